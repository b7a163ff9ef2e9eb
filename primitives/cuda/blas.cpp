// cuBLAS behind blas.hpp. A handle and its workspace belong to one stream, so that products on two
// streams never share memory. f32 is rounded to TF32 where a product says so and nowhere else, and
// sums of half types stay in f32.
#include "primitives/cuda/blas.hpp"

#include <cublas_v2.h>

#include <map>
#include <memory>
#include <utility>

#include "primitives/cuda/noted.hpp"
#include "primitives/launch.hpp"

namespace shardproof::primitives::cuda {
namespace {

constexpr size_t workspace_bytes = size_t(32) << 20;
constexpr cublasMath_t math =
    cublasMath_t(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);

// The library's states have the numbers of other codes of the runtime. Where the runtime has one,
// it says more.
int code_of(cublasStatus_t state) {
  if (state == CUBLAS_STATUS_SUCCESS) return 0;
  const int runtime = cudaGetLastError();
  if (state == CUBLAS_STATUS_ALLOC_FAILED) return executor::out_of_memory;
  return runtime ? runtime : blas_codes + int(state);
}

class Handle {
 public:
  explicit Handle(cudaStream_t stream) {
    code_ = code_of(cublasCreate(&handle_));
    if (code_ == 0) code_ = noted(cudaMalloc(&workspace_, workspace_bytes));
    if (code_ == 0) code_ = code_of(cublasSetStream(handle_, stream));
    if (code_ == 0) code_ = code_of(cublasSetWorkspace(handle_, workspace_, workspace_bytes));
    if (code_ == 0) code_ = code_of(cublasSetMathMode(handle_, math));
  }
  ~Handle() {
    if (handle_) cublasDestroy(handle_);
    cudaFree(workspace_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cublasHandle_t get() const { return handle_; }
  int code() const { return code_; }

 private:
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  int code_ = 0;
};

// Of the calling thread, which has one device.
Handle& handle_of(cudaStream_t stream) {
  thread_local std::map<cudaStream_t, std::unique_ptr<Handle>> handles;
  std::unique_ptr<Handle>& h = handles[stream];
  if (!h) h = std::make_unique<Handle>(stream);
  return *h;
}

cudaDataType_t type_of(Number n) {
  switch (n) {
    case Number::f64:
      return CUDA_R_64F;
    case Number::bf16:
      return CUDA_R_16BF;
    case Number::f16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// The library's matrices are stored by columns: a row-major C is its C^T = op(B)^T op(A)^T.
cublasOperation_t operation(const BareGemm::Matrix& m) {
  return m.turned ? CUBLAS_OP_T : CUBLAS_OP_N;
}

}  // namespace

int bare_gemm(const BareGemm& g, void* stream) {
  const Handle& h = handle_of(static_cast<cudaStream_t>(stream));
  if (h.code() != 0) return h.code();
  const bool wide = g.in == Number::f64;
  const double one = 1, beta = g.add ? 1 : 0;
  const float one_f = 1, beta_f = float(beta);
  return code_of(cublasGemmEx_64(h.get(), operation(g.b), operation(g.a), g.n, g.m, g.k,
                                 wide ? static_cast<const void*>(&one) : &one_f, g.b.data,
                                 type_of(g.in), g.b.ld, g.a.data, type_of(g.in), g.a.ld,
                                 wide ? static_cast<const void*>(&beta) : &beta_f, g.c.data,
                                 type_of(g.out), g.c.ld,
                                 wide     ? CUBLAS_COMPUTE_64F
                                 : g.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                          : CUBLAS_COMPUTE_32F,
                                 CUBLAS_GEMM_DEFAULT));
}

const char* text_of(int code) {
  if (code < blas_codes) return cudaGetErrorString(cudaError_t(code));
  return cublasGetStatusString(cublasStatus_t(code - blas_codes));
}

namespace {

std::string bits_of(int64_t value) {
  std::string text;
  for (const auto& [bit, name] :
       {std::pair<int64_t, const char*>(CUBLAS_PEDANTIC_MATH, "pedantic"),
        {CUBLAS_TF32_TENSOR_OP_MATH, "TF32"},
        {CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, "no reduced-precision reduction"}})
    if ((value & bit) == bit) text += (text.empty() ? "" : ", ") + std::string(name);
  return text.empty() ? "default" : text;
}

}  // namespace

// Asked of a handle that is made as those of products are.
std::string blas_settings() {
  const Handle h(nullptr);
  if (h.code() != 0)
    return "cuBLAS=no handle, " + std::to_string(h.code()) + ": " + text_of(h.code()) + "\n";
  cublasMath_t mode = CUBLAS_DEFAULT_MATH;
  cublasAtomicsMode_t atomics = CUBLAS_ATOMICS_NOT_ALLOWED;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
  int version = 0, target = 0;
  int code = cublasGetMathMode(h.get(), &mode);
  if (!code) code = cublasGetAtomicsMode(h.get(), &atomics);
  if (!code) code = cublasGetPointerMode(h.get(), &pointers);
  if (!code) code = cublasGetVersion(h.get(), &version);
  if (!code) code = cublasGetSmCountTarget(h.get(), &target);
  if (code) return "cuBLAS=cannot be asked, " + std::to_string(code) + "\n";
  return "cuBLAS.version=" + std::to_string(version) + "\ncuBLAS.math=" + bits_of(mode) +
         "\ncuBLAS.atomics=" + (atomics == CUBLAS_ATOMICS_ALLOWED ? "allowed" : "not allowed") +
         "\ncuBLAS.scalars=" + (pointers == CUBLAS_POINTER_MODE_HOST ? "host" : "device") +
         "\ncuBLAS.multiprocessors=" + (target == 0 ? "all" : std::to_string(target)) +
         "\ncuBLAS.workspace=" + std::to_string(workspace_bytes >> 20) + " MiB a stream\n";
}

}  // namespace shardproof::primitives::cuda
