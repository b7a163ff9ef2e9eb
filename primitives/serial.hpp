// A body run by one thread: elements, rows, columns and tiles in their order, each column summed
// from the first row to the last. What tiles share starts as NaN.
#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "primitives/tile_products.hpp"

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

template <class Math, class Team, class Body>
void run_tiles(const Body& body) {
  using Room = typename Body::template Room<Math, Team>;
  const auto room = std::make_unique<Room>();
  std::memset(static_cast<void*>(room.get()), 0xFF, sizeof(Room));
  const int64_t tiles = body.template tiles<Math, Team>();
  for (int64_t i = 0; i < tiles; ++i) body.template tile<Math>(i, Team{}, *room);
}

template <class Body>
void run(const Body& body) {
  if constexpr (Body::shape == Shape::elements) {
    for (int64_t i = 0; i < body.count(); ++i) body.at(i);
  } else if constexpr (Body::shape == Shape::rows) {
    body.wide ? run_rows<double>(body) : run_rows<float>(body);
  } else if constexpr (Body::shape == Shape::tiles) {
    in_arithmetic_of(body, [&](auto math) {
      run_tiles<decltype(math), OneThread<>>(body);
      return 0;
    });
  } else {
    body.wide ? run_columns<double>(body) : run_columns<float>(body);
  }
}

}  // namespace shardproof::primitives
