// A training step of a pipeline over pp whose forwards and backwards take turns: the stack of
// pipeline_stages, and with it the gradients of x and of every layer's parameters, from cotangents
// dy that are handed in. Layers, chunks and rows of microbatches are those of pipeline.hpp; what a
// stage does in which tick is told by schedule= (timetable.hpp).
//
//   calls   after each tick a shift +1 over pp where any stage has made what the stage behind it
//           computes with, then one -1 where any has for the stage before it; who has nothing to
//           send that way gives an empty block. In the end one all-reduce over dp of the stage's
//           gradients, coalesced
//   held    what has arrived, and the inputs of a chunk's further layers: until the microbatch's B
//           on the chunk is done or, where W is put off, its W, and with it then the cotangents of
//           every layer. A block is taken again as soon as it is free, so that as many are held as
//           the schedule has in flight. recompute=on keeps what has arrived alone, and the inputs
//           of further layers are made again from it before B
//   scale   loss=mean: dy counts 1/M, a microbatch's loss is one of M; loss=sum: as it is
//
// Sums over microbatches are kept in the accumulation type, or in local_grad=. There is no
// backward.
#pragma once
#include <compare>
#include <map>

#include "primitives/pipeline.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_pipeline_schedule(const Case&);

// Of the i-th tensor that passes through a chunk: 0 is its input, then what each layer makes.
struct Place {
  int64_t microbatch = 0, chunk = 0, i = 0;
  auto operator<=>(const Place&) const = default;
};

// Blocks of one shape, held by place.
class Held {
 public:
  View take(Parallel&, const std::vector<int64_t>& shape, const Place&);
  View at(const Place& place) const { return blocks_[by_place_.at(place)]; }
  bool holds(const Place& place) const { return by_place_.contains(place); }
  void release(const Place&);
  // Microbatches whose i-th tensor of a chunk is held, as they were taken.
  std::vector<int64_t> in_flight(int64_t chunk, int64_t i) const;
  size_t blocks() const { return blocks_.size(); }

 private:
  std::vector<View> blocks_;
  std::vector<size_t> free_;
  std::map<Place, size_t> by_place_;
  std::vector<Place> order_;
};

class PipelineSchedule : public Kernel {
 public:
  // inputs x [T,h], w_l [h,h] and b_l [h] of every layer, dy [T,h]; outputs y, dx [T,h], dw_l,
  // db_l. Other stages' tensors have no rows.
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;

 protected:
  struct Step {
    Parallel p;
    Stage stage;
    Timetable table;
    bool recompute = false;
    View x, dy, y, dx;
    Views w, b, dw, db;           // by layer
    Views dw_sum, db_sum;         // of own layers
    Held activations, gradients;  // of activations
    View leaving;                 // [n,h]

    Step(Rank&, Timetable, std::span<const View> inputs, std::span<const View> outputs);
    int64_t first_layer(int64_t chunk) const { return first_layer_of(stage, chunk); }
    int64_t layers(int64_t chunk) const { return first_layer(chunk + 1) - first_layer(chunk); }
    int64_t microbatches() const { return table.plan().microbatches; }
    bool is_last(Unit u) const { return u.chunk + 1 == stage.chunks(); }
    View nothing() const { return leaving.narrow(0, 0, 0); }
    View rows(const View& all, int64_t m) const;      // of a microbatch
    View filled(const View& block, int64_t m) const;  // of a block
    View take(Held&, const Place&);
    View at(const Held&, const Place&) const;
  };

  virtual Timetable timetable_of(Rank&) const;
  virtual void begin(Step&) {}
  virtual void after(Step&, const Action&) {}  // a tick's work
  virtual void reduce(Step&, const Parts&);    // over dp, in the end

  // Where what arrives is put, and what is sent where `made` is due.
  virtual View arrival(Step&, const Action& of);
  virtual View sent(Step&, const Action&, const View& made) { return made; }
  virtual View output_rows(const Step& s, int64_t m) const { return s.rows(s.y, m); }
  virtual View weight(Step& s, int64_t layer, Work) { return s.w[size_t(layer)]; }

  // The i-th tensor of a chunk, as F has it, and its cotangent as B has it.
  virtual View activation(Step&, Unit, int64_t i);
  virtual View cotangent(Step&, Unit, int64_t i);
  virtual int64_t cotangent_rows_of(const Step&, int64_t m) const { return m; }  // of dy
  virtual double divisor(const Step&, int64_t m) const;                          // of dy
  // The units whose activations and cotangents W multiplies.
  virtual Unit activations_of(const Step&, Unit u) const { return u; }
  virtual Unit cotangents_of(const Step&, Unit u) const { return u; }
  virtual void add_weight_gradient(Step&, Unit, int64_t layer, const View& x, const View& g);
  virtual void release(Step&, Unit);
  // The inputs of a chunk's further layers, and the same where they were not kept (recompute=on).
  void make_inner(Step&, Unit);
  virtual void make_again(Step& s, Unit u) { make_inner(s, u); }
  virtual DType type_of_sums(const Step&) const;

  void run_weights(Step&, Unit);

 private:
  View perform(Step&, const Action&);
  View run_forward(Step&, Unit);
  View run_backward(Step&, Unit);
  void drop_inner(Step&, Unit);
  void hand_on(Step&, int64_t tick, const View& made);
  View arriving(Step&, int64_t tick, int64_t hop);
  void make_sums(Step&, Parts&);
};

}  // namespace shardproof::primitives
