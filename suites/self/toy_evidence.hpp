// Evidence made by hand: a toy contract whose mathematics is the identity of what its types denote
// (all of copy, reduce, scatter, gather, reduce-scatter and all-to-all are that), and local maps
// that a test writes as it likes, right or broken. No rank runs: a loop plays all of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fixtures/sharding.hpp"
#include "oracle/check.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/registry.hpp"

namespace shardproof::toy {

using Locals = std::vector<std::vector<double>>;  // by rank, row-major

// ---- Maps on one axis of p ranks, tensors cut along dim 0 ----

inline Locals all_reduce(const Locals& x, double scale = 1) {
  std::vector<double> sum(x[0].size());
  for (const auto& part : x)
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  for (double& v : sum) v *= scale;
  return Locals(x.size(), sum);
}
inline Locals scaled(Locals x, double by) {
  for (auto& part : x)
    for (double& v : part) v *= by;
  return x;
}
inline Locals own_block(const Locals& x) {
  Locals y;
  for (size_t r = 0; r < x.size(); ++r) {
    const auto n = std::ptrdiff_t(x[r].size() / x.size());
    y.emplace_back(x[r].begin() + n * std::ptrdiff_t(r), x[r].begin() + n * std::ptrdiff_t(r + 1));
  }
  return y;
}
inline Locals all_gather(const Locals& x) {
  std::vector<double> all;
  for (const auto& part : x) all.insert(all.end(), part.begin(), part.end());
  return Locals(x.size(), all);
}
inline Locals in_zeros(const Locals& x) {
  Locals y(x.size(), std::vector<double>(x[0].size() * x.size()));
  for (size_t r = 0; r < x.size(); ++r)
    std::copy(x[r].begin(), x[r].end(), y[r].begin() + std::ptrdiff_t(r * x[r].size()));
  return y;
}
inline Locals reduce_scatter(const Locals& x) { return own_block(all_reduce(x)); }
inline Locals next_owner(Locals x) {  // the block of rank r - 1 arrives at rank r
  std::rotate(x.begin(), x.end() - 1, x.end());
  return x;
}
inline Locals previous_owner(Locals x) {
  std::rotate(x.begin(), x.begin() + 1, x.end());
  return x;
}
// Square [n, n]: rows of a rank [n/p, n] to its columns [n, n/p].
inline Locals rows_to_columns(const Locals& x) {
  const size_t p = x.size(), n = size_t(std::llround(std::sqrt(double(p * x[0].size())))),
               b = n / p;
  Locals y(p, std::vector<double>(n * b));
  for (size_t r = 0; r < p; ++r)
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < b; ++j) y[r][i * b + j] = x[i / b][(i % b) * n + r * b + j];
  return y;
}
inline Locals columns_to_rows(const Locals& y) {
  const size_t p = y.size(), n = size_t(std::llround(std::sqrt(double(p * y[0].size())))),
               b = n / p;
  Locals x(p, std::vector<double>(n * b));
  for (size_t r = 0; r < p; ++r)
    for (size_t i = 0; i < b; ++i)
      for (size_t j = 0; j < n; ++j) x[r][i * n + j] = y[j / b][(r * b + i) * b + j % b];
  return x;
}

// ---- The contract ----

// P axes summed away: whole values to what they denote.
inline Whole denote(const Case& line, const std::vector<int64_t>& shape, const Layout& layout,
                    const Whole& w, double (*of)(double)) {
  const Mesh mesh = line.mesh();
  Whole d{denoted_shape(shape, layout, mesh), {}};
  d.value.assign(size_t(product(d.shape)), 0);
  std::vector<bool> taken(w.value.size());
  for (int r = 0; r < mesh.world(); ++r) {
    const auto from = whole_indices(shape, layout, mesh, r),
               to = denoted_indices(shape, layout, mesh, r);
    for (size_t i = 0; i < from.size(); ++i) {
      if (taken[size_t(from[i])]) continue;
      taken[size_t(from[i])] = true;
      d.value[size_t(to[i])] += of(w.value[size_t(from[i])]);
    }
  }
  return d;
}

inline Gauge gauge_of(const Case& line, const std::vector<int64_t>& shape, const Layout& layout,
                      const Whole& w) {
  Gauge g;
  g.magnitude = denote(line, shape, layout, w, [](double v) { return std::abs(v); }).value;
  g.squares = denote(line, shape, layout, w, [](double v) { return v * v; }).value;
  for (const auto& [axis, placement] : layout)
    if (placement.kind == Placement::partial) g.reduced *= line.ranks(axis);
  return g;
}

inline Contract contract(std::vector<int64_t> shape, Layout from, Layout to) {
  Contract c;
  c.name = "toy";
  c.family = "toy";
  c.linear = true;
  c.operands = [=](const Case&) {
    return std::vector<Operand>{{"x", Operand::input, shape, from},
                                {"y", Operand::output, shape, to}};
  };
  const auto identity = [shape](const Case& line, const Layout& layout, const Whole& w,
                                std::vector<Gauge>* gauges) {
    if (gauges) *gauges = {gauge_of(line, shape, layout, w)};
    return std::vector<Whole>{denote(line, shape, layout, w, [](double v) { return v; })};
  };
  c.forward = [=](const Case& line, std::span<const Whole> x, std::vector<Gauge>* g) {
    return identity(line, from, x[0], g);
  };
  c.backward = [=](const Case& line, std::span<const Whole>, std::span<const Whole> y,
                   std::vector<Gauge>* g) { return identity(line, dual(to), y[0], g); };
  c.integer_range = [](const Case& line) { return exact_range(line.dtype(), line.world(), 1); };
  c.traffic = [](const Case&, const std::string&, int) { return std::vector<Traffic>{}; };
  return c;
}

// ---- What is known before the ranks run, and what one of them left behind ----

// One shot. Refers to line and contract: they outlive it.
inline Evidence evidence_of(const Case& line, const Contract& c) {
  Evidence e;
  e.line = &line, e.contract = &c;
  e.mesh = line.mesh();
  e.operands = c.operands(line);
  for (const Operand& o : e.operands) e.inputs += o.role != Operand::output;
  e.shots.emplace_back();
  return e;
}

// A value of the first step, as one row.
inline ResultTensor result_of(int operand, const std::vector<double>& values,
                              DType dtype = DType::f64) {
  ResultTensor t{0, operand, false, dtype, {int64_t(values.size())}, {}};
  t.bytes.resize(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i)
    store(t.bytes.data() + i * size_of(dtype), dtype, values[i]);
  return t;
}

// ---- A subject that the test plays ----

using Map = std::function<Locals(const Locals&)>;

// x becomes a parameter, whose gradients the microbatches of a step add up.
inline Contract of_microbatches(Contract c, const char* microbatches) {
  c.operands = [operands = c.operands](const Case& line) {
    auto list = operands(line);
    list[0].role = Operand::parameter;
    return list;
  };
  Key key{"microbatches", microbatches, "in a step"};
  key.low = 1, key.high = 4;
  c.keys.push_back(key);
  return c;
}

class Play {
 public:
  Play(Contract c, const std::string& keys, Map forward, Map backward)
      : forward_(std::move(forward)), backward_(std::move(backward)) {
    registry_.add(std::move(c));
    line_ = parse("toy " + keys, registry_);
    e = evidence_of(line_, registry_.contract("toy"));
    e.shots[0].name = "base";
    Feed& feed = e.shots[0].feeds[0];
    feed.fill = fill_of(line_);
    feed.seed = line_.seed();
    feed.range = e.contract->integer_range(line_).value_or(1);
    e.truth = [this](const Feed& f) -> const Truth& { return truth(f); };
  }
  Play(const Play&) = delete;

  // Plans the check's shots and runs every shot that has not run yet.
  void run(const std::string& check) {
    if (const Check& c = check_named(check); c.plan) c.plan(e, e.shots);
    e.ranks.resize(size_t(e.mesh.world()));
    for (size_t s = e.ranks[0].shots.size(); s < e.shots.size(); ++s) run_shot(int(s));
  }
  CheckResult judge(const std::string& check) {
    run(check);
    return check_named(check).judge(e);
  }
  CheckResult judge_again(const std::string& check) const { return check_named(check).judge(e); }

  ResultTensor& result(int rank, int shot, bool gradient, int step = -1) {
    for (ResultTensor& t : e.ranks[size_t(rank)].shots[size_t(shot)].results)
      if (t.gradient == gradient && (step < 0 || t.step == step)) return t;
    throw std::logic_error("no such result in the toy");
  }
  double get(int rank, bool gradient, int64_t i, int shot = 0) {
    const ResultTensor& t = result(rank, shot, gradient);
    return load(t.bytes.data() + size_t(i) * size_of(t.dtype), t.dtype);
  }
  void set(int rank, bool gradient, int64_t i, double v, int shot = 0) {
    ResultTensor& t = result(rank, shot, gradient);
    store(t.bytes.data() + size_t(i) * size_of(t.dtype), t.dtype, v);
  }

  Evidence e;

 private:
  const Truth& truth(const Feed& feed) {
    truths_.push_back(std::make_unique<Truth>());
    Truth& t = *truths_.back();
    const bool gauges = !exact_data(e, feed);
    t.inputs = {drawn(e, feed, 0, false)};
    t.cotangents = {drawn(e, feed, 1, true)};
    t.outputs = e.contract->forward(line_, t.inputs, gauges ? &t.output_gauges : nullptr);
    t.gradients =
        e.contract->backward(line_, t.inputs, t.cotangents, gauges ? &t.gradient_gauges : nullptr);
    return t;
  }

  Locals cut(const Whole& w, const Layout& layout) const {
    Locals local;
    for (int r = 0; r < e.mesh.world(); ++r) {
      local.emplace_back();
      for (int64_t i : whole_indices(e.operands[0].shape, layout, e.mesh, r))
        local.back().push_back(w.value[size_t(i)]);
    }
    return local;
  }

  void keep(int shot, int step, int operand, bool gradient, const Locals& values) {
    for (int r = 0; r < e.mesh.world(); ++r) {
      ResultTensor t = result_of(operand, values[size_t(r)], line_.dtype());
      t.step = step, t.gradient = gradient;
      e.ranks[size_t(r)].shots[size_t(shot)].results.push_back(std::move(t));
    }
  }

  void run_shot(int s) {
    const Shot& shot = e.shots[size_t(s)];
    for (RankRecord& r : e.ranks) {
      r.shots.emplace_back();
      r.shots.back().status = ShotRecord::ok;
    }
    for (size_t at = 0, step = 0; at < shot.program.size(); at += 3, ++step) {
      const Feed& feed = shot.feeds[size_t(shot.program[at + 1] - '0')];
      const bool back = shot.program[at] == 'B';
      const Layout layout = back ? dual(e.operands[1].layout) : e.operands[0].layout;
      const Locals in = cut(drawn(e, feed, back ? 1 : 0, back), layout);
      keep(s, int(step), back ? 0 : 1, back, (back ? backward_ : forward_)(in));
    }
  }

  Registry registry_;
  Case line_;
  Map forward_, backward_;
  std::vector<std::unique_ptr<Truth>> truths_;
};

inline Layout on_tp(const Placement& p) { return {{Axis::tp, p}}; }

}  // namespace shardproof::toy
