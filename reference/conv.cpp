#include "reference/conv.hpp"

#include "reference/sequences.hpp"

namespace shardproof::reference {
namespace {

// Calls visit(place of y, place of x, place of w) for every product of the convolution.
template <class Visit>
void each_product(const Conv& s, std::span<const int64_t> sequences, const Visit& visit) {
  const size_t channels = size_t(s.channels), width = size_t(s.width);
  for (const auto& places : places_by_sequence(sequences))
    for (size_t t = 0; t < places.size(); ++t)
      for (size_t j = 0; j < width; ++j) {
        if (t + 1 + j < width) continue;  // t - k + 1 + j < 0
        for (size_t c = 0; c < channels; ++c)
          visit(places[t] * channels + c, places[t + 1 + j - width] * channels + c, c * width + j);
      }
}

}  // namespace

Values conv(const Conv& s, std::span<const int64_t> sequences, In x, In w, In b) {
  Values y(x.size());
  for (size_t i = 0; i < y.size(); ++i)
    if (sequences[i / size_t(s.channels)] >= 0) y[i] = b[i % size_t(s.channels)];
  each_product(s, sequences,
               [&](size_t to, size_t from, size_t tap) { y[to] += w[tap] * x[from]; });
  return y;
}

ConvGradients conv_backward(const Conv& s, std::span<const int64_t> sequences, In x, In w, In g) {
  ConvGradients d{Values(x.size()), Values(w.size()), Values(size_t(s.channels))};
  each_product(s, sequences, [&](size_t to, size_t from, size_t tap) {
    d.x[from] += w[tap] * g[to];
    d.w[tap] += g[to] * x[from];
  });
  for (size_t i = 0; i < g.size(); ++i)
    if (sequences[i / size_t(s.channels)] >= 0) d.b[i % size_t(s.channels)] += g[i];
  return d;
}

}  // namespace shardproof::reference
