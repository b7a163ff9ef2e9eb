// cuBLAS behind blas.hpp. A handle and its workspace belong to one stream, so that products on two
// streams never share memory. f32 is not rounded to TF32, and sums of half types stay in f32.
#include "primitives/cuda/blas.hpp"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <map>
#include <memory>

namespace shardproof::primitives::cuda {
namespace {

constexpr size_t workspace_bytes = size_t(32) << 20;
constexpr cublasMath_t math =
    cublasMath_t(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);

class Handle {
 public:
  explicit Handle(cudaStream_t stream) {
    code_ = cublasCreate(&handle_);
    if (code_ == 0) code_ = cudaMalloc(&workspace_, workspace_bytes);
    if (code_ == 0) code_ = cublasSetStream(handle_, stream);
    if (code_ == 0) code_ = cublasSetWorkspace(handle_, workspace_, workspace_bytes);
    if (code_ == 0) code_ = cublasSetMathMode(handle_, math);
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
  return cublasGemmEx_64(
      h.get(), operation(g.b), operation(g.a), g.n, g.m, g.k,
      wide ? static_cast<const void*>(&one) : &one_f, g.b.data, type_of(g.in), g.b.ld, g.a.data,
      type_of(g.in), g.a.ld, wide ? static_cast<const void*>(&beta) : &beta_f, g.c.data,
      type_of(g.out), g.c.ld, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

}  // namespace shardproof::primitives::cuda
