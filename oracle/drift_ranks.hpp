// The training loop that `drift` runs on ranks, and the parts of it that the parent computes again.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "oracle/comm/world.hpp"
#include "oracle/job.hpp"
#include "oracle/registry.hpp"

namespace shardproof::drift {

// Steps `first` .. first + count - 1; the first job of a world begins at 0.
struct Work {
  int64_t first = 0, count = 0;
  std::string line;     // canonical, healthy
  std::string control;  // "": none; from step `from` on
  int64_t from = 0;
  std::string optimizer;
  double rate = 0;
  bool digests = false;  // for a log: layout-invariant digests beside the hashes
};
std::vector<std::byte> serialize(const Work&);
bool is_work(std::span<const std::byte>);  // and no job of a case
Work parse_work(std::span<const std::byte>);

// A rank's record of a job is one ShotRecord a step; results are told apart by their step number.
enum Tag : int {
  after_backward = 0,  // gradients as the kernel handed them over
  before_step = 1,     // with the sums that the training step owes
  after_step = 2,      // parameters
  at_start = 3,        // parameters, where they were made
  first_moment = 4,    // of the optimizer, where it has them
  second_moment = 5,
  hash_of = 10,      // + one of the above: BytesHash
  digest_of = 20,    // + one of the above: shardproof_digest, where a log is written
  microbatch = 100,  // + number: outputs, and cotangents (gradient = true)
  drawn = -1000      // + number: what the kernel draws, as looks_at_draws of the line orders it
};

RankMain rank_main(const Registry&);

// ---- What both sides compute

int64_t microbatches(const Case&);
// The line of a microbatch: `draw`, where the contract has it, counts step * microbatches + m.
Case line_of(const Case&, int64_t step, int64_t m);
// Whole values, as every rank draws its shard of them.
Whole initial(const Case&, const Operand&, const Mesh&);
Whole input_of(const Case&, const Operand&, const Mesh&, int64_t step, int64_t m);
Whole target_of(const Case&, const Operand&, const Mesh&, int64_t step, int64_t m);
// The loss is sum (y - t)^2 / 2n over all elements of the outputs and microbatches.
double elements_of_loss(const Case&, const std::vector<Operand>&);
// Whether this rank's copy of an output counts: of copies that each rank uses alone (R) the first.
bool seeds_loss(const Operand&, const Mesh&, int rank);

// Axes over which the training step owes the sum of a parameter's gradient: those where it is R.
std::vector<Axis> owed(const Operand&, const Mesh&);

// In double, rounded to the storage type once: equal bits from equal bits.
class Optimizer {
 public:
  Optimizer(std::string name, double rate) : name_(std::move(name)), rate_(rate) {}
  // p <- p - update(g); the state of tensor `which` is kept.
  void step(int which, std::vector<double>& parameter, std::span<const double> gradient,
            DType storage);
  // Of Adam: 0 the mean of gradients, 1 that of their squares; else empty.
  std::vector<double>& moment(int which, int number);
  // As after so many steps that left these moments.
  void resume(int which, int64_t steps, std::vector<double> mean, std::vector<double> square);

 private:
  struct State {
    int64_t steps = 0;
    std::vector<double> moments[2];
  };
  State& state(int which);
  std::string name_;
  double rate_;
  std::vector<State> states_;
};

// How many steps of a line fit into one job.
int64_t steps_of_job(const Case&, const Contract&);

}  // namespace shardproof::drift
