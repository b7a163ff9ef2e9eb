#include "primitives/rotary_context.hpp"

#include <cmath>

namespace shardproof::primitives {
namespace {

bool in_single(const Case& line) {
  return line.dtype() != DType::f64 && dtype_from(line.text("acc")) != DType::f64;
}

template <class A>
void turn_in(std::vector<double>& x, const std::vector<int64_t>& positions, int64_t heads,
             int64_t dim, double base, int sense) {
  const int64_t half = dim / 2;
  for (size_t t = 0; t < positions.size(); ++t)
    for (int64_t i = 0; i < half; ++i) {
      const A angle = A(positions[t]) * A(std::pow(base, -2.0 * double(i) / double(dim)));
      const A c = std::cos(angle), s = A(sense) * std::sin(angle);
      for (int64_t h = 0; h < heads; ++h) {
        double* head = &x[(t * size_t(heads) + size_t(h)) * size_t(dim)];
        const A a = A(head[i]), b = A(head[i + half]);
        head[i] = double(a * c - b * s);
        head[i + half] = double(b * c + a * s);
      }
    }
}

}  // namespace

std::optional<Rejected> refused_rotary(const Case& line) {
  if (auto refused = refused_context(line)) return refused;
  const int64_t d = line.at("head_dim"), n = line.at("heads"), tp = line.ranks(Axis::tp);
  if (d % 2) return Rejected("an even head_dim", std::to_string(d), "features are turned in pairs");
  if (n % tp)
    return Rejected("heads divisible by tp = " + std::to_string(tp), std::to_string(n),
                    "choose a multiple");
  return {};
}

void turn(const View& x, const std::vector<int64_t>& positions, double base, int sense, bool single,
          const View& y) {
  std::vector<double> values = to_doubles(x);
  const int64_t dim = x.shape.back(), heads = x.shape[x.shape.size() - 2];
  if (single)
    turn_in<float>(values, positions, heads, dim, base, sense);
  else
    turn_in<double>(values, positions, heads, dim, base, sense);
  fill_from(y, values);
}

std::vector<int64_t> RotaryContext::positions(const ContextLine& c, int r) const {
  std::vector<int64_t> list;
  for (const Label& label : local_labels(
           c, c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c), r))
    list.push_back(label.position);
  return list;
}

std::unique_ptr<Saved> RotaryContext::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_rotary(line)) throw *refused;
  turn(inputs[0], positions(ContextLine(line), rank.coordinate(Axis::cp)),
       number_of(line, "base", 10000), 1, in_single(line), outputs[0]);
  return std::make_unique<Saved>();
}

void RotaryContext::backward(Rank& rank, Saved&, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  const Case& line = rank.line();
  turn(cotangents[0], positions(ContextLine(line), rank.coordinate(Axis::cp)),
       number_of(line, "base", 10000), -1, in_single(line), gradients[0]);
}

}  // namespace shardproof::primitives
