// Pipeline parallelism over the axis pp: each stage holds a run of layers, and microbatches of the
// own tokens travel from stage to stage.
//
//   layers    L, cut into K = p v chunks of ceil or floor(L/K), the longer first; v = virtual
//   stages    chunk k lies on stage k mod p: with v = 1 a stage has one run of layers, with v > 1
//             it has v of them (interleaved). A chunk without layers hands on what it is given.
//   rows      microbatch m is rows m n .. (m+1) n - 1 of the own tokens, n = micro_batch_size; the
//             last one has what is left
//   schedule  chunk k works on microbatch m at tick
//                floor(m/p) p v + floor(k/p) p + m mod p + k mod p:
//             one chunk a stage and tick, one tick after chunk k - 1. Backward is the same with
//             chunk K-1 first, microbatches in their order or (backward_order=lifo) the last first.
//   calls     after each tick but the last one shift over pp, +1 forward, -1 backward, of which a
//             stage without anything to send sends nothing: its block is empty. With v = 1 nothing
//             passes from the last stage to the first, with v > 1 the ring closes.
//
// Gradients of parameters are sums over the microbatches, kept in the accumulation type, or in
// local_grad=, as autograd adds them up in the storage type; after the last microbatch a stage
// all-reduces its own, coalesced, over dp. What a forward keeps lies in its state: the input of
// every own layer, by microbatch. What travels between stages keeps the storage type.
//
//   pipeline_stages   Y = X_L, X_{l+1} = X_l W_l^T + b_l; X on the first stage, Y on the last
//   pipeline_tied     X_0 = rows of W [V,h] by id on the first stage, logits X_L W^T on the last,
//                     each with a copy of W. Its gradient is the sum of both parts: behind the sum
//                     over dp one all-reduce over the group of the two (pp itself where these are
//                     all stages); a single stage has both parts and makes no call.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "primitives/replicated.hpp"
#include "primitives/timetable.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_pipeline_stages(const Case&);

using Views = std::vector<View>;

// One stage of a line's pipeline.
struct Stage {
  int64_t stages = 1, own = 0;
  int64_t rounds = 1;  // chunks a stage: v
  int64_t layers = 1;
  int64_t tokens = 1, size = 1;  // own tokens, and those of a microbatch
  bool last_first = false;       // order of microbatches in the backward

  explicit Stage(Rank&);
  Stage(int64_t stages, int64_t own, int64_t rounds, int64_t layers, int64_t tokens, int64_t size);
  int64_t microbatches() const { return (tokens + size - 1) / size; }
  int64_t chunks() const { return stages * rounds; }
  int64_t ticks() const;
  std::optional<Unit> forward_at(int64_t tick) const;
  std::optional<Unit> backward_at(int64_t tick) const;
  int64_t rows_of(int64_t microbatch) const;
};
// First layer of a chunk; of the chunk behind the last: all layers.
int64_t first_layer_of(const Stage&, int64_t chunk);

// dw += g^T x and db += sum of g's rows, made in the accumulation type and added to sums of any.
void add_layer_gradients(Parallel&, const View& x, const View& g, const View& dw, const View& db);
// In which a stage keeps its sums over microbatches: local_grad=, or that of accumulation.
DType type_of_stage_sums(const Parallel&);

struct PipelineSaved : Saved {
  Views inputs;               // the judge keeps arguments alive until the backward that reads them
  std::vector<Kept> arrived;  // by own chunk: what the chunk before gave, [own tokens, h]
  std::vector<Kept> inner;    // by layer, own ones that begin no chunk: their input
};

class PipelineStages : public Kernel {
 public:
  // inputs x [T,h], then w_l [h,h], b_l [h] of every layer, without rows where another stage owns
  // it; output y [T,h]. x and y have no rows but on the first and the last stage.
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  struct Pass {  // of one call
    Parallel& p;
    const Stage& stage;
    PipelineSaved& saved;
    View result;                           // y, or its cotangent
    std::span<const View> gradients = {};  // backward only, as what follows
    Views sums = {};                       // of parameters' gradients, numbered as the arguments
    Parts parts = {};                      // what is reduced over dp in the end
    View leaving = {};                     // [n,h], as these
    std::array<View, 2> arriving = {}, scratch = {};
    View of_embedded = {}, of_last = {};  // pipeline_tied: gradients of X_0 [T,h], of X_L [n,h]
  };

  virtual std::optional<Rejected> refused(const Case&) const;
  virtual Stage stage_of(Rank& rank) const { return Stage(rank); }
  virtual std::unique_ptr<PipelineSaved> make_saved(Parallel&, const Stage&) const;

  // What lies before the first layer and behind the last one: here x and y themselves.
  virtual void begin(Pass&) {}
  virtual View first_input(const Stage&, const PipelineSaved&, int64_t m) const;
  virtual View last_output(Pass&, int64_t m) const;
  virtual void end(Pass&, int64_t /*m*/) {}  // behind the last layer
  virtual void begin_back(Pass&) {}
  virtual View last_cotangent(Pass&, int64_t m);
  virtual View first_gradient(Pass&, int64_t m) const;
  virtual void end_back(Pass&) {}
  virtual size_t first_parameter() const { return 1; }  // of the layers

  // Whose parameters a layer computes with.
  virtual int64_t parameters_of(const Stage&, int64_t layer) const { return layer; }
  // Rows of a microbatch: in what arrives, in what a layer is given, in y, in its cotangent; and
  // the microbatch whose state a backward takes.
  virtual View arrived_rows(const Stage&, const View& all, int64_t m) const;
  virtual View inner_rows(const Stage&, const View& all, int64_t m) const;
  virtual View result_rows(const Stage&, const View& y, int64_t m) const;
  virtual View cotangent_rows(const Stage&, const View& g, int64_t m) const;
  virtual int64_t state_of(const Stage&, int64_t m) const { return m; }

  virtual void pass_on(const View& in, const View& out) const;  // a chunk without layers
  // Of one microbatch, added to the sums.
  virtual void weight_gradient(Pass&, int64_t m, const View& x, const View& g, const View& dw,
                               const View& db);
  virtual DType type_of_sums(const Parallel&) const;
  virtual void input_gradient(Pass&, Unit, const View& dx);     // as it leaves a chunk
  virtual void reduce(Pass&, const Parts&);                     // over dp
  virtual void add_gradient(const View& own, const View& sum);  // of a pass to the step's

  size_t weight_of(int64_t layer) const { return first_parameter() + size_t(2 * layer); }
  size_t bias_of(int64_t layer) const { return weight_of(layer) + 1; }

 private:
  View compute(Pass&, Unit);
  View compute_back(Pass&, Unit, const View& arrived);
  View input_of(Pass&, Unit, int64_t microbatch);
  void gradients_of(Parallel&, Saved&, std::span<const View> cotangents,
                    std::span<const View> gradients);
  void make_sums(Pass&);
};

// inputs ids [T], w [V,h], then the layers'; output logits [T,V].
class PipelineTied : public PipelineStages {
 public:
  // Small values by (seed, parameter, index): equal on both ends.
  bool init(Rank&, std::span<const View> parameters) override;

 protected:
  virtual uint64_t seed_of(Rank&) const;
  std::optional<Rejected> refused(const Case&) const override;
  std::unique_ptr<PipelineSaved> make_saved(Parallel&, const Stage&) const override;
  void begin(Pass&) override;
  View first_input(const Stage&, const PipelineSaved&, int64_t m) const override;
  View last_output(Pass&, int64_t m) const override;
  void end(Pass&, int64_t m) override;
  void begin_back(Pass&) override;
  View last_cotangent(Pass&, int64_t m) override;
  View first_gradient(Pass&, int64_t m) const override;
  void end_back(Pass&) override;
  size_t first_parameter() const override { return 2; }
  void reduce(Pass&, const Parts&) override;

  virtual View table(Pass&) const;                         // as the logits have it
  virtual void add_rows(Pass&, const View& of_ids);        // the embedding's part to the sum
  virtual void reduce_table(Pass&, const View& of_stage);  // over both ends
};
std::optional<Rejected> refused_pipeline_tied(const Case&);
bool holds_table(const Stage&);
// The first and the last of more than two stages; pp itself where these are all.
Communicator& ends_of(Parallel&, const Stage&);

}  // namespace shardproof::primitives
