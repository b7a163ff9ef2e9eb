// Readers of files from outside under libFuzzer. SHARDPROOF_FUZZ names the reader.
//
//   SHARDPROOF_FUZZ=npy build/suites/fuzz/shardproof_fuzz fixtures/fuzz/npy
//
// Any bytes are read or refused by BadInput in one line, without a crash, an undefined step, or an
// allocation beyond what the bytes can hold. What was read is held against the rules of its format.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "oracle/case.hpp"
#include "oracle/digest/log.hpp"
#include "oracle/json.hpp"
#include "oracle/tensors/npy.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace {

using namespace shardproof;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "accepted although it does not hold: %s\n", what);
  std::abort();
}

uint64_t elements_of(const std::vector<int64_t>& shape) {
  uint64_t n = 1;
  for (int64_t extent : shape) n *= uint64_t(extent);
  return n;
}

void read_safetensors(std::span<const std::byte> file) {
  const tensors::Contents c(file, "f");
  uint64_t data = 0;
  const std::byte* at = c.tensors().empty() ? nullptr : c.tensors()[0].bytes.data();
  for (const tensors::FileTensor& t : c.tensors()) {
    require(t.bytes.data() == at, "a tensor begins where the one before it ends");
    at += t.bytes.size();
    data += t.bytes.size();
    if (t.dtype)
      require(elements_of(t.shape) * size_of(*t.dtype) == t.bytes.size(),
              "shape x dtype is the range");
    require(c.find(t.name) == &t, "each name stands once");
  }
  if (!c.tensors().empty()) require(at == file.data() + file.size(), "tensors cover the data");
  require(data <= file.size(), "data are within the file");
}

void read_npy(std::span<const std::byte> file) {
  const tensors::Array a = tensors::npy_array(file, "f");
  if (a.dtype)
    require(elements_of(a.shape) * size_of(*a.dtype) == a.bytes.size(),
            "shape x descr is the data");
  require(a.bytes.data() + a.bytes.size() == file.data() + file.size(), "data end with the file");
}

void read_json(const std::string& text) {
  const JsonValue v = parse_json(text, "f", {.bytes = size_t(1) << 16, .depth = 16});
  shown(v);
  require(json_text(v.words).size() >= 2, "a text has its quotes");
}

void read_log(const std::string& text) {
  const digest::Log log = digest::parse_log(text, "f");
  // Coverage is computed index by index: a line that claims millions of them takes its time.
  uint64_t claimed = 0;
  for (const digest::LogLine& line : log.lines)
    claimed += std::min<uint64_t>(line.digest.elements, 1 << 20);
  if (claimed > 1 << 16) return;
  digest::log_text(digest::judge_log(log), {log});
  digest::compare_logs(log, log);
}

void feed(const std::string& reader, std::span<const std::byte> bytes) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (reader == "safetensors") return read_safetensors(bytes);
  if (reader == "npy") return read_npy(bytes);
  if (reader == "json") return read_json(text);
  if (reader == "log") return read_log(text);
  std::fprintf(stderr, "SHARDPROOF_FUZZ: expected safetensors, npy, json or log, met '%s'\n",
               reader.c_str());
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const char* const reader = std::getenv("SHARDPROOF_FUZZ");
  try {
    feed(reader ? reader : "", {reinterpret_cast<const std::byte*>(data), size});
  } catch (const BadInput& e) {
    require(!std::strchr(e.what(), '\n'), "a refusal is one line");
  }
  return 0;
}
