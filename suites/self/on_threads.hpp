// Kernels of a case on ranks that are threads (thread_door.hpp), with inputs and cotangents that a
// test gives: numbers that are known beforehand.
#pragma once
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fixtures/sharding.hpp"
#include "oracle/contract.hpp"
#include "suites/self/thread_door.hpp"

namespace shardproof::on_threads {

using Numbers = std::vector<double>;

struct Workspaces {
  int64_t elements = 0;
  std::vector<std::vector<int64_t>> shapes;
};

class ThreadedRank final : public Rank {
 public:
  ThreadedRank(const Case& line, TestRank& place) : line_(line), place_(place) {}
  const Case& line() const override { return line_; }
  int world_rank() const override { return place_.state.rank; }
  int world_size() const override { return place_.state.size; }
  const Mesh& mesh() const override { return place_.mesh; }
  Stream stream() const override { return nullptr; }
  Communicator& along(Axis axis) override {
    auto& group = groups_[axis];
    if (!group) group = std::make_unique<Communicator>(place_.group(axis), place_.transport);
    return *group;
  }
  Communicator& along(const std::vector<Axis>& axes) override { return along(axes.at(0)); }
  Communicator& world() override { throw std::logic_error("no world here"); }
  View workspace(DType dtype, std::vector<int64_t> shape) override {
    used.elements += product(shape);
    used.shapes.push_back(shape);
    buffers_.push_back(std::make_unique<Buffer>(dtype, std::move(shape)));
    return buffers_.back()->view();
  }
  Workspaces used;

 private:
  const Case& line_;
  TestRank& place_;
  std::map<Axis, std::unique_ptr<Communicator>> groups_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

// Whole outputs and gradients (none of an index), and what each rank used and threw.
struct Outcome {
  std::vector<Numbers> outputs, gradients;
  std::vector<Workspaces> forward;
  std::vector<std::string> thrown;
};

// `make` gives a rank's kernel; `after` looks at it behind its backward, one rank at a time.
// Without cotangents there is no backward.
template <class Make, class After>
Outcome run_kernels(const Case& line, const std::vector<Operand>& operands, const Make& make,
                    const std::vector<Numbers>& inputs, const std::vector<Numbers>& cotangents,
                    const After& after) {
  const Mesh mesh = line.mesh();
  const size_t first_output = inputs.size();
  Outcome run;
  run.forward.resize(size_t(mesh.world()));
  for (size_t i = 0; i < operands.size(); ++i) {
    const bool output = i >= first_output, due = output || operands[i].gradient;
    (output ? run.outputs : run.gradients)
        .emplace_back(size_t(due ? product(operands[i].shape) : 0), NAN);
  }
  std::mutex lock;
  run.thrown = run_ranks(mesh, [&](TestRank& place) {
    const int r = place.state.rank;
    ThreadedRank rank(line, place);
    const auto shard = [&](const Operand& o, const Numbers* whole) {
      Buffer b(stored_type(line, o), local_shape(o.shape, o.layout, mesh, r));
      Numbers local;
      if (whole)
        for (int64_t i : whole_indices(o.shape, o.layout, mesh, r))
          local.push_back((*whole)[size_t(i)]);
      if (whole) fill_from(b.view(), local);
      return b;
    };
    std::vector<Buffer> buffers;
    buffers.reserve(2 * operands.size());
    std::vector<View> in, out, cot, grad;
    const auto add = [&](std::vector<View>& views, const Operand& o, const Numbers* whole) {
      buffers.push_back(shard(o, whole));
      views.push_back(buffers.back().view());
    };
    for (size_t i = 0; i < operands.size(); ++i) {
      const Operand& o = operands[i];
      const bool output = i >= first_output;
      add(output ? out : in, o, output ? nullptr : &inputs[i]);
      if (cotangents.empty())
        continue;
      else if (output)
        add(cot, o, &cotangents[i - first_output]);
      else if (o.gradient)
        add(grad, o, nullptr);
      else
        grad.emplace_back();
    }
    const auto kernel = make();
    auto saved = kernel->forward(rank, in, out);
    const Workspaces used = rank.used;
    if (!cotangents.empty()) kernel->backward(rank, *saved, cot, grad);
    const std::lock_guard hold(lock);
    run.forward[size_t(r)] = used;
    after(r, *kernel);
    const auto gather = [&](const Operand& o, const View& v, Numbers& whole) {
      if (!v.data) return;
      const Numbers local = to_doubles(v);
      const auto at = whole_indices(o.shape, o.layout, mesh, r);
      for (size_t i = 0; i < at.size(); ++i) whole[size_t(at[i])] = local[i];
    };
    for (size_t i = 0; i < out.size(); ++i)
      gather(operands[first_output + i], out[i], run.outputs[i]);
    for (size_t i = 0; i < grad.size(); ++i) gather(operands[i], grad[i], run.gradients[i]);
  });
  return run;
}

// Of a contract that has no backward.
template <class Make>
Outcome run_step(const Case& line, const std::vector<Operand>& operands, const Make& make,
                 const std::vector<Numbers>& inputs) {
  return run_kernels(line, operands, make, inputs, {}, [](int, Kernel&) {});
}

}  // namespace shardproof::on_threads
