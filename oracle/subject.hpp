// All that a kernel author includes: an implementation under test of a contract.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fixtures/tensor.hpp"
#include "oracle/case.hpp"
#include "oracle/comm/communicator.hpp"

namespace shardproof {

inline constexpr int subject_interface_version = 1;

// A precondition that does not hold. Thrown before any call, equal on all ranks.
struct Rejected : std::runtime_error {
  std::string expected, met, advice;
  Rejected(std::string expected, std::string met, std::string advice);
};

inline constexpr int side_streams = 2;

// Handed to the subject, valid for one case. Local shapes come with the views; global extents and
// attributes are read from the line.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual const Case& line() const = 0;
  virtual int world_rank() const = 0;
  virtual int world_size() const = 0;
  virtual const Mesh& mesh() const = 0;
  virtual Stream stream() const = 0;
  // Further streams on a device, numbered from 1 to side_streams; null on the host. Nothing orders
  // them with the rank's stream but the subject's own events. Tensors come and are fetched on the
  // rank's.
  virtual Stream side_stream(int /*number*/) const { return nullptr; }
  virtual Communicator& along(Axis) = 0;
  // First axis fastest. Those of one rank change nothing, also where traffic is compared.
  virtual Communicator& along(const std::vector<Axis>&) = 0;
  virtual Communicator& world() = 0;
  // Poisoned, guarded, the judge's; until this forward or backward returns. What the backward reads
  // of the forward is in Saved, in memory of the kernel's own.
  virtual View workspace(DType, std::vector<int64_t> shape) = 0;
  // Throws Rejected where the contract refuses the line: for a kernel without preconditions of its
  // own.
  virtual void require_legal() const {}
  // True in a step of several microbatches: gradients of parameters come as running sums (zero at
  // the step's start) that the backward adds to. Else every gradient is written over.
  virtual bool accumulates() const { return false; }
  // False in a backward of such a step that others of it follow. What a step does once, such as to
  // reduce what its microbatches have added up, is done by the one that ends it.
  virtual bool ends_step() const { return true; }
  int coordinate(Axis a) const { return mesh().coordinate(world_rank(), a); }
};

struct Saved {  // what one forward keeps; several may be in flight
  virtual ~Saved() = default;
};

// One object a rank and case; nothing in statics. Before the forwards of a case it may be asked for
// one of other extents (Declared::other_extents).
class Kernel {
 public:
  virtual ~Kernel() = default;
  // Inputs and parameters in the contract's order, outputs likewise; local views that the judge
  // allocates, poisons and guards. Inputs are read-only.
  virtual std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                         std::span<const View> outputs) = 0;
  // One cotangent for each output, one gradient for each input (empty view, data == nullptr, where
  // none is due: index operands, frozen parameters).
  virtual void backward(Rank&, Saved&, std::span<const View> cotangents,
                        std::span<const View> gradients);
  // Deferred weight gradients.
  virtual void finish(Rank&, Saved&, std::span<const View> /*gradients*/) {}
  // True: made its own.
  virtual bool init(Rank&, std::span<const View> /*parameters*/) { return false; }
};

// One call that is due in a forward or a backward. A group of one rank issues none.
struct Traffic {
  Op op;
  Reduce reduce;
  std::string label;  // group: "tp", "cp", ...
  bool backward = false;
  int64_t count = 0;  // elements of the local `in` buffer of each call
  DType dtype = DType::f64;
  int hop = 0;
  int rank = -1;  // -1: every rank
  // What it returns, alike on all members, cancels out of every result, of which it moves the
  // rounding alone: the maximum that a softmax subtracts.
  bool cancels = false;
  // Made once in a step of several microbatches, by the backward that ends it.
  bool once_a_step = false;
};

// Whether a subject has a backward: as its contract does, unless it says so itself.
class HasBackward {
 public:
  HasBackward& operator=(bool has) {
    has_ = has, said_ = true;
    return *this;
  }
  operator bool() const { return has_; }
  bool said() const { return said_; }
  void unless_said(bool has) { has_ = said_ ? has_ : has; }

 private:
  bool has_ = true, said_ = false;
};

struct Declared {
  bool deterministic = true, strided = true, own_communication = false, threads = true;
  HasBackward backward;
  bool leak_bitwise = true;
  bool other_extents = true;  // false: an object keeps to the number of tokens of its first forward
  std::string plan;           // one of the contract's traffic plans; empty: its default
  // Its calls on a rank in order, where they are others than the contract's; null: the contract's.
  // The check `ledger` holds it to them.
  std::function<std::vector<Traffic>(const Case&, int rank)> traffic = nullptr;
  std::vector<DType> storage = {DType::f64, DType::f32, DType::bf16, DType::f16};
  // Sums where a line has no acc=: in half precision instead of f32; in f64 whatever is stored.
  bool accumulates_in_storage = false, accumulates_in_f64 = false;
  bool truncates = false;           // truncating accumulator
  bool multiplies_in_tf32 = false;  // factors of f32 products keep 10 bits of their fraction
  // What of the contract it does not do, in words of a line: "gather_output=on", or a key alone for
  // every value but its default. Lines that hold one are not due: counted and printed.
  std::vector<std::string> without;
};

struct Subject {
  std::string name;  // "" is ours, the default
  std::string contract;
  std::function<std::unique_ptr<Kernel>()> make;
  Declared declared;
};

}  // namespace shardproof
