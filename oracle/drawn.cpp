#include "oracle/drawn.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace shardproof {
namespace {

// The element whose value stands for all along expanded dims: their indices set to 0.
int64_t shown_element(int64_t index, std::span<const int64_t> shape, std::span<const int> dims) {
  int64_t left = index, stride = 1, shown = index;
  for (size_t d = shape.size(); d-- > 0; left /= shape[d], stride *= shape[d])
    if (std::find(dims.begin(), dims.end(), int(d)) != dims.end())
      shown -= left % shape[d] * stride;
  return shown;
}

// What has a mean far from zero are activations: parameters and gradients have none.
Fill fill_of(const Drawing& d) {
  const bool activation = d.operand.role == Operand::input && !d.cotangent;
  return d.feed.fill == Fill::offset && !activation ? Fill::normal : d.feed.fill;
}

// Of the whole shape, which begins with what P and V axes stack.
std::vector<int> expanded_in_whole(const Drawing& d) {
  std::vector<int> dims = expanded_dims(d.line, d.operand, d.cotangent);
  const int stacked = int(d.whole_shape.size() - d.operand.shape.size());
  for (int& dim : dims) dim += stacked;
  return dims;
}

// Zero where the index along dim 0, behind what P and V axes stack, is in the first half.
void silence_half(const Drawing& d, std::span<const int64_t> indices, std::vector<double>& values) {
  if (d.operand.shape.empty()) return;
  const size_t dim = d.whole_shape.size() - d.operand.shape.size();
  const int64_t extent = d.whole_shape[dim], stride = product(d.whole_shape.subspan(dim + 1));
  for (size_t i = 0; i < indices.size(); ++i)
    if (indices[i] / stride % extent < extent / 2) values[i] = 0;
}

std::vector<double> values_at(const Drawing& d, std::span<const int64_t> indices) {
  const Operand& o = d.operand;
  std::vector<double> values;
  if (d.cotangent && !o.gradient) {
    values.resize(indices.size());
  } else if (!o.stated.empty() && !d.cotangent) {
    for (int64_t at : indices) values.push_back(o.stated.at(size_t(at)));
  } else if (o.made && !d.cotangent) {
    const std::vector<double> all = o.made(d.feed.seed);  // the same in every stack
    for (int64_t at : indices) values.push_back(all.at(size_t(at) % all.size()));
  } else if (o.below > 0 && !d.cotangent) {
    for (int64_t at : indices)
      values.push_back(draw_index(d.feed.seed, stream_of(o, false), o.below, at));
  } else {
    values = draw_at({fill_of(d), d.feed.seed, d.feed.range, o.contraction},
                     stream_of(o, d.cotangent), d.dtype, d.whole_shape, indices);
    if (o.magnitude && !d.cotangent)
      for (double& v : values) v = std::abs(v);
    if (o.through && !d.cotangent)
      for (double& v : values) v = round_to(o.through(v, d.feed.fill == Fill::integers), d.dtype);
    if (o.factor)
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = round_to(values[i] * o.factor(indices[i]), d.dtype);
  }
  return values;
}

}  // namespace

std::string stream_of(const Operand& o, bool cotangent) {
  return cotangent ? "cotangent of " + o.name : o.name;
}

bool expands(const Case& line) {
  return line.has("strides") && line.text("strides").starts_with("expanded");
}

std::vector<int> expanded_dims(const Case& line, const Operand& o, bool cotangent) {
  std::vector<int> dims;
  if (!expands(line)) return dims;
  const std::string& strides = line.text("strides");
  if (strides == "expanded" && cotangent) {
    dims.resize(o.shape.size());
    std::iota(dims.begin(), dims.end(), 0);
  }
  if (strides == "expanded_inputs" && !cotangent && o.role == Operand::input && o.shape.size() > 1)
    dims.push_back(int(o.shape.size()) - 2);
  return dims;
}

bool is_drawn(const Feed& feed, int operand) {
  const auto is_this = [&](const auto& g) { return g.operand == operand; };
  return std::none_of(feed.basis.begin(), feed.basis.end(), is_this) &&
         std::none_of(feed.given.begin(), feed.given.end(), is_this);
}

std::vector<double> drawn_at(const Drawing& d, std::span<const int64_t> indices) {
  const std::vector<int> dims = expanded_in_whole(d);
  if (dims.empty()) {
    std::vector<double> values = values_at(d, indices);
    if (d.feed.silent_half && d.cotangent) silence_half(d, indices, values);
    return values;
  }
  std::vector<int64_t> shown;
  for (int64_t i : indices) shown.push_back(shown_element(i, d.whole_shape, dims));
  return values_at(d, shown);
}

// In pieces: the list of all indices would be as large as the values.
std::vector<double> drawn_whole(const Drawing& d) {
  constexpr int64_t piece = 1 << 16;
  const int64_t n = product(d.whole_shape);
  std::vector<double> values;
  std::vector<int64_t> indices;
  values.reserve(size_t(n));
  for (int64_t first = 0; first < n; first += piece) {
    indices.resize(size_t(std::min(piece, n - first)));
    std::iota(indices.begin(), indices.end(), first);
    const auto drawn = drawn_at(d, indices);
    values.insert(values.end(), drawn.begin(), drawn.end());
  }
  return values;
}

}  // namespace shardproof
