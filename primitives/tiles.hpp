// Tiles of matrices, which a team of threads holds in memory that it shares and multiplies. Bodies
// of Shape::tiles are built of them: serial.hpp runs such a body by one thread, cuda/tile_block.cuh
// by a block. One text serves both: what differs is the team, which says
//
//   threads, thread()   how many there are, and which one this is
//   join()              what one thread has put into shared memory the others see behind it
//   any, all            of the team's own bool, and a join
//   upto(whole, there)  how far a loop over a tile's extent goes, of which `there` are in use: to
//                       the end of these, or of the extent, so that the loop can be unrolled. What
//                       lies between holds zeros then
//   Size<Math>          extents of tiles
//   Dots, Sums<Math>    its products (tile_products.hpp)
#pragma once
#include <cmath>

#include "primitives/element.hpp"

// On a device: a loop over what a thread holds in registers has to be unrolled; one whose body is
// long is not, since most of what ptxas does would be for its copies.
#ifdef __CUDA_ARCH__
#define SHARDPROOF_UNROLLED _Pragma("unroll")
#define SHARDPROOF_ROLLED _Pragma("unroll 1")
#else
#define SHARDPROOF_UNROLLED
#define SHARDPROOF_ROLLED
#endif

namespace shardproof::primitives {

// ---- What products are made in

// Factors and sums of one type; products are fused with the sum, one rounding each.
template <class A>
struct Whole {
  using Sum = A;
  using Factor = A;
  static constexpr Number number = sizeof(A) == 8 ? Number::f64 : Number::f32;
  SHARDPROOF_HD static Factor narrow(Sum value) { return value; }
  SHARDPROOF_HD static Sum widen(Factor factor) { return factor; }
};

// Factors of 16 bits, whose products are exact in the sum's type: what tensor cores take.
template <Number half>
struct Halves {
  using Sum = float;
  using Factor = uint16_t;
  static constexpr Number number = half;
  SHARDPROOF_HD static Factor narrow(Sum value) { return rounded_half<half>(value); }
  SHARDPROOF_HD static Sum widen(Factor factor) {
    return half == Number::bf16 ? widened_bf16(factor) : factor_of_f16(factor);
  }
};

// A body says by `factors()` what its products are made in.
template <class Body, class Run>
int in_arithmetic_of(const Body& body, Run run) {
  switch (body.factors()) {
    case Number::f64:
      return run(Whole<double>{});
    case Number::bf16:
      return run(Halves<Number::bf16>{});
    case Number::f16:
      return run(Halves<Number::f16>{});
    default:
      return run(Whole<float>{});
  }
}

// ---- What holds them

// Sixteen bytes: what a thread reads at once.
template <class T>
struct alignas(16) Unit {
  static constexpr int length = 16 / sizeof(T);
  T at[length];
};

// Rows lie an odd number of units apart, so that neither eight rows of one unit nor eight units of
// one row meet in a bank of a device's shared memory.
template <class T, int rows_, int columns_>
struct Tile {
  static constexpr int rows = rows_, columns = columns_, unit = Unit<T>::length;
  static constexpr int pitch = columns + unit;
  static_assert(columns / unit % 2 == 0 && columns % unit == 0, "an odd number of units apart");
  alignas(16) T values[rows * pitch];

  SHARDPROOF_HD T& at(int row, int column) { return values[row * pitch + column]; }
  SHARDPROOF_HD const T& at(int row, int column) const { return values[row * pitch + column]; }
  SHARDPROOF_HD Unit<T> unit_at(int row, int column) const {
    return read_element<Unit<T>>(&values[row * pitch + column]);
  }
  SHARDPROOF_HD void put(int row, int column, const Unit<T>& u) {
    write_element(&values[row * pitch + column], u);
  }
};

// `own` rows stay while tiles of `other` rows pass by, each in strips of `strip` columns: `depth`
// of them at a time where rows are multiplied with rows, `lines` rows where weights are multiplied
// with rows. `parts` threads share a row of scores.
template <int own_, int other_, int strip_, int depth_, int lines_, int parts_>
struct TileSize {
  static constexpr int own = own_, other = other_, strip = strip_, depth = depth_, lines = lines_,
                       parts = parts_;
  static_assert(strip % depth == 0 && other % lines == 0 && other % parts == 0);
};

// Those of a device's block (cuda/tile_block.cuh). Here, so that one thread can go through the same
// tiles: bits of whole factors are the same then.
template <class Math>
struct BlockTile {
  using Size = TileSize<64, 64, 128, 32, 16, 2>;
};
template <>
struct BlockTile<Whole<double>> {
  using Size = TileSize<32, 32, 128, 16, 8, 4>;
};
template <Number half>
struct BlockTile<Halves<half>> {
  using Size = TileSize<64, 64, 128, 128, 64, 2>;
};

// What is in use of a product's extents.
struct Extent {
  int own, other, columns;
};

// ---- Rows of tensors into tiles

// Rows of `width` elements, which lie in steps of one stride: those of a view's last dim. A place
// below 0 is a row that is not there or may not be read; it is taken for zeros.
struct RowSource {
  const Tensor& from;
  int64_t width;
  const int64_t* places;  // of the first elements

  SHARDPROOF_HD int64_t step() const { return width > 1 ? from.strides[from.dims - 1] : 1; }
  // Whether every so many elements of every row may be read at once.
  SHARDPROOF_HD bool in_units(int unit) const {
    const int bytes = unit * bytes_of(from.number);
    bool aligned = step() == 1 && width % unit == 0 && uint64_t(from.data) % uint64_t(bytes) == 0;
    for (int d = 0; d + 1 < from.dims; ++d) aligned = aligned && from.strides[d] % unit == 0;
    return aligned;
  }
};

// A factor of 16 bits is its tensor's, bit for bit; others are read as what they are.
template <class Math>
SHARDPROOF_HD typename Math::Factor factor_at(const Tensor& from, int64_t place) {
  if constexpr (sizeof(typename Math::Factor) == 2)
    return read_element<uint16_t>(from.address(place));
  else
    return from.template load_from<typename Math::Factor>(place);
}

template <class Math>
SHARDPROOF_HD Unit<typename Math::Factor> unit_of_halves(const Tensor& from, int64_t place) {
  using U = Unit<typename Math::Factor>;
  struct alignas(2 * U::length) Packed {
    uint16_t at[U::length];
  };
  const auto packed = read_element<Packed>(from.address(place));
  U u = {};
  SHARDPROOF_UNROLLED
  for (int e = 0; e < U::length; ++e)
    u.at[e] = typename Math::Factor(from.number == Number::bf16 ? widened_bf16(packed.at[e])
                                                                : factor_of_f16(packed.at[e]));
  return u;
}

// A unit of factors that lie side by side, of the type of the factors or, where these are wider, of
// halves.
template <class Math>
SHARDPROOF_HD Unit<typename Math::Factor> unit_at(const Tensor& from, int64_t place) {
  using U = Unit<typename Math::Factor>;
  if constexpr (sizeof(typename Math::Factor) > 2) {
    if (from.number != Math::number) return unit_of_halves<Math>(from, place);
  }
  return read_element<U>(from.address(place));
}

// The tile's rows from `first` on, of which `there` are, and columns from `column` on.
template <class Math, class Team, class ToTile>
SHARDPROOF_HD void stage(const Team& team, const RowSource& rows, int first, int there,
                         int64_t column, ToTile& to) {
  using T = typename Math::Factor;
  constexpr int unit = Unit<T>::length, units = ToTile::columns / unit;
  const int64_t rest = (rows.width - column + unit - 1) / unit;
  const int in_row = Team::upto(units, rest < units ? int(rest) : units),
            count = Team::upto(ToTile::rows, there) * in_row;
  const bool halves = bytes_of(rows.from.number) == 2;
  if ((rows.from.number == Math::number || halves) && rows.in_units(unit)) {
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
    for (int u = team.thread(); u < count; u += Team::threads) {
      const int row = u / in_row, at = u % in_row * unit;
      const int64_t place = rows.places[first + row];
      Unit<T> value = {};
      if (place >= 0 && column + at < rows.width)
        value = unit_at<Math>(rows.from, place + column + at);
      to.put(row, at, value);
    }
    return;
  }
  const int elements = in_row * unit;
  SHARDPROOF_ROLLED
  for (int i = team.thread(); i < count * unit; i += Team::threads) {
    const int row = i / elements, at = i % elements;
    const int64_t place = rows.places[first + row];
    to.at(row, at) = place >= 0 && column + at < rows.width
                         ? factor_at<Math>(rows.from, place + (column + at) * rows.step())
                         : T(0);
  }
}

}  // namespace shardproof::primitives
