// Bodies of expert-parallel layers: rows that are taken by a list, weighed, and added up by token.
//
//   to_i = from_{index_i}                       what leaves for other ranks, and its way back
//   to_i = w_{slot_i} from_{token of slot_i}    cotangents of rows that were weighed
//   y_t  = sum over j of w_tj rows_{place_tj}   k rows a token, in the order of its choices
//   dw_s = <g_{token of s}, rows_{place_s}>     slot s = t k + j
//
// A negative index is no row: what is taken from there is zero, and adds nothing.
#pragma once
#include "primitives/element.hpp"

namespace shardproof::primitives {

struct TakeRows {
  static constexpr Shape shape = Shape::elements;
  Tensor from, index, to;
  int64_t columns = 1;
  template <class F>
  void each_tensor(F f) {
    f(from), f(index), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    const int64_t row = index.integer(i / columns);
    if (row < 0)
      to.store(i, 0.0);
    else
      to.copy_from(i, from, row * columns + i % columns);
  }
};

struct WeighedRows {
  static constexpr Shape shape = Shape::elements;
  Tensor from, weights, slots, to;
  int64_t columns = 1, choices = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(from), f(weights), f(slots), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t slot = slots.integer(i / columns);
    A row = 0;
    if (slot >= 0)
      row = weights.load<A>(slot) * from.load<A>(slot / choices * columns + i % columns);
    to.store(i, row);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// Without weights a sum.
struct RowsOfToken {
  static constexpr Shape shape = Shape::elements;
  Tensor rows, places, weights, to;
  int64_t columns = 1, choices = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(rows), f(places), f(weights), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t first = i / columns * choices, column = i % columns;
    A sum = 0;
    for (int64_t slot = first; slot < first + choices; ++slot) {
      const int64_t place = places.integer(slot);
      if (place < 0) continue;
      const A row = rows.load<A>(place * columns + column);
      sum += weights.there() ? A(weights.load<A>(slot) * row) : row;
    }
    to.store(i, sum);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

struct ProbGradient {
  static constexpr Shape shape = Shape::rows;
  Tensor g, rows_of_slots, places, to;
  int64_t columns = 1, choices = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(g), f(rows_of_slots), f(places), f(to);
  }
  SHARDPROOF_HD int64_t rows() const { return to.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t slot, const Team& team) const {
    const int64_t token = slot / choices * columns, place = places.integer(slot) * columns;
    A sum = 0;
    for (int64_t j = team.first(); place >= 0 && j < columns; j += team.step())
      sum += g.load<A>(token + j) * rows_of_slots.load<A>(place + j);
    sum = team.sum(sum);
    if (team.leads()) to.store(slot, sum);
  }
};

}  // namespace shardproof::primitives
