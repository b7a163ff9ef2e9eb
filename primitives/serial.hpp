// A body run by one thread: elements, rows and columns in their order, each column summed from the
// first row to the last.
#pragma once
#include <vector>

#include "primitives/element.hpp"

namespace shardproof::primitives {

template <class A, class Body>
void run_rows(const Body& body) {
  for (int64_t r = 0; r < body.rows(); ++r) body.template row<A>(r, Alone{});
}

template <class A, class Body>
void run_columns(const Body& body) {
  std::vector<A> sums(static_cast<size_t>(body.columns()));
  for (int64_t r = 0; r < body.rows(); ++r)
    for (int64_t c = 0; c < body.columns(); ++c) sums[size_t(c)] += body.template term<A>(r, c);
  for (int64_t c = 0; c < body.columns(); ++c) body.put(c, sums[size_t(c)]);
}

template <class Body>
void run(const Body& body) {
  if constexpr (Body::shape == Shape::elements) {
    for (int64_t i = 0; i < body.count(); ++i) body.at(i);
  } else if constexpr (Body::shape == Shape::rows) {
    body.wide ? run_rows<double>(body) : run_rows<float>(body);
  } else {
    body.wide ? run_columns<double>(body) : run_columns<float>(body);
  }
}

}  // namespace shardproof::primitives
