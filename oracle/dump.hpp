// `--dump DIR`: the tensors of cases that did not pass, to be looked at with any tool that reads
// safetensors. One folder a case, named after its line:
//
//   finding.txt          the block of the terminal
//   global.safetensors   x, grad.y               inputs, parameters and cotangents; P and V stacked
//                        got.y, want.y           what the ranks' results denote (P summed, the
//                        got.grad.x, ...         first copy of I and R), and the truth in f64
//   rank0.safetensors    x, grad.y               its shards, as it was given them
//                        got.y, got.grad.x       what it returned; absent where it returned nothing
//                        want.y, want.grad.x     its part of the truth in f64; absent where the
//                                                tensor is partial, since only the sum is due
//
// A folder is there once it is whole. Until then it is hidden (.NAME.partPID) beside it, and goes
// with a run that is interrupted; what a killed one leaves, with the next run that dumps there.
//
// Of the first forward and backward of the case: further ones (repeat, perturbed inputs) are not
// dumped.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "oracle/run.hpp"

namespace shardproof {

class Dumps {
 public:
  static constexpr int most_cases = 20;
  static constexpr int64_t most_bytes = int64_t(1) << 30;  // of a case

  explicit Dumps(std::string folder);
  ~Dumps();
  // Writes a case, unless there are enough of them or it is too large. May be called in processes
  // that were forked since: all count together. What cannot be written is told, never thrown.
  void add(const Judged&, const Truth&, const std::string& program);
  std::string told() const;   // "2 of 3 cases that did not pass, in DIR"; "" where there was none
  std::string error() const;  // why one could not be written, "" none

 private:
  struct Shared;                      // memory of all processes
  std::string part_of_owner() const;  // how names of unfinished folders end
  void remove_parts(const std::function<bool(const std::filesystem::path&)>& of) const;
  std::string folder_;
  int owner_;  // the process that made it
  Shared* shared_;
};

// A name for a folder that no line can lead astray: letters, digits and -_=.,+ of the line's
// beginning, and a hash of the whole of it.
std::string folder_name(const std::string& line, const std::string& canonical);

}  // namespace shardproof
