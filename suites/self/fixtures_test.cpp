// What everything else stands on: rounding by bits, copies that keep bits, guards that notice,
// groups of a mesh against Megatron's tables, Philox against its known answers, pinned fills, and
// sharding by hand-made examples. Literals of fills come from a separate program of the formulas in
// fixtures/README.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

#include "fixtures/dtype.hpp"
#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "fixtures/placement.hpp"
#include "fixtures/places.hpp"
#include "fixtures/random.hpp"
#include "fixtures/regressions.hpp"
#include "fixtures/sharding.hpp"
#include "fixtures/tensor.hpp"

namespace shardproof {
namespace {
namespace fixtures_test {

using Ints = std::vector<int64_t>;
using Groups = std::vector<std::vector<int>>;

constexpr DType all_dtypes[] = {DType::f64, DType::f32, DType::bf16,
                                DType::f16, DType::i64, DType::i32};
constexpr DType float_dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// What an exception says, "" when there is none.
template <class Call>
std::string complaint(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_COMPLAINT(call, part)                                             \
  do {                                                                           \
    const std::string met = complaint([&] { (void)(call); });                    \
    EXPECT_NE(met.find(part), std::string::npos) << "met '" << met << "'";       \
    EXPECT_NE(met.find("expected"), std::string::npos) << "met '" << met << "'"; \
  } while (false)

uint64_t bits_of(const std::byte* at, DType dtype) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, size_of(dtype));
  return bits;
}

Ints iota(int64_t n) {
  Ints values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), int64_t(0));
  return values;
}

// ---- Element types

TEST(DType, NamesAndBytes) {
  const std::map<std::string, size_t> bytes = {{"f64", 8}, {"f32", 4}, {"bf16", 2},
                                               {"f16", 2}, {"i64", 8}, {"i32", 4}};
  std::set<std::string> met;
  for (DType dtype : all_dtypes) {
    EXPECT_EQ(dtype_from(name(dtype)), dtype);
    EXPECT_EQ(size_of(dtype), bytes.at(name(dtype)));
    met.insert(name(dtype));
  }
  EXPECT_EQ(met.size(), bytes.size());
  EXPECT_FALSE(dtype_from("f8"));
  EXPECT_FALSE(dtype_from(""));
  EXPECT_COMPLAINT(size_of(DType(17)), "met 17");
}

TEST(DType, UnitRoundoffIsHalfTheGapAboveOne) {
  for (DType dtype : float_dtypes) {
    const double u = unit_roundoff(dtype);
    EXPECT_EQ(u, std::ldexp(1, -significand_bits(dtype)));
    EXPECT_EQ(round_to(1 + 2 * u, dtype), 1 + 2 * u) << name(dtype);  // the next number
    EXPECT_EQ(round_to(1 + u, dtype), 1) << name(dtype);              // the middle goes to even
    EXPECT_EQ(round_to(smallest_subnormal(dtype), dtype), smallest_subnormal(dtype));
    EXPECT_EQ(round_to(smallest_subnormal(dtype) / 2, dtype), 0);
  }
  EXPECT_EQ(unit_roundoff(DType::i32), 0);
}

// Every finite half, its neighbour and the middle between them: the whole rounding rule.
template <class Half>
void check_rounding(uint16_t infinity, Half (*narrow)(double)) {
  for (uint16_t bits = 0; bits < infinity; ++bits) {
    const double low = double(to_float(Half{bits}));
    // The "neighbour" of the largest number is where the next one would be.
    const double high = bits + 1 < infinity
                            ? double(to_float(Half{uint16_t(bits + 1)}))
                            : low + (low - double(to_float(Half{uint16_t(bits - 1)})));
    const double middle = low + (high - low) / 2;  // exact in double
    const auto even = uint16_t(bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(narrow(low).bits, bits);
    ASSERT_EQ(narrow(-low).bits, bits | 0x8000);
    ASSERT_EQ(narrow(middle).bits, even) << bits;
    ASSERT_EQ(narrow(-middle).bits, even | 0x8000) << bits;
    ASSERT_EQ(narrow(std::nextafter(middle, low)).bits, bits) << bits;
    ASSERT_EQ(narrow(std::nextafter(middle, high)).bits, bits + 1) << bits;
  }
}

TEST(DType, HalvesRoundToNearestTiesToEven) {
  check_rounding<bf16>(0x7F80, to_bf16);
  check_rounding<f16>(0x7C00, to_f16);
}

TEST(DType, HalvesRoundOnceFromDouble) {
  // Through float the last term is lost and the tie falls back to 1.
  EXPECT_EQ(to_bf16(1 + 0x1p-8 + 0x1p-40).bits, 0x3F81);
  EXPECT_EQ(to_f16(1 + 0x1p-11 + 0x1p-40).bits, 0x3C01);
  EXPECT_EQ(to_bf16(1 + 0x1p-8).bits, 0x3F80);
  EXPECT_EQ(to_bf16(1 + 3 * 0x1p-8).bits, 0x3F82);
  EXPECT_EQ(to_f16(65519.999).bits, 0x7BFF);
  EXPECT_EQ(to_f16(65520).bits, 0x7C00);
  EXPECT_EQ(to_bf16(std::numeric_limits<double>::denorm_min()).bits, 0);
  EXPECT_EQ(to_bf16(-std::numeric_limits<double>::min()).bits, 0x8000);
  EXPECT_EQ(to_f16(0x1p-25 + 0x1p-60).bits, 1);
  EXPECT_EQ(to_bf16(std::numeric_limits<double>::max()).bits, 0x7F80);
}

TEST(DType, HalvesKeepInfinityAndNaN) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(to_bf16(-infinity).bits, 0xFF80);
  EXPECT_EQ(to_f16(infinity).bits, 0x7C00);
  EXPECT_EQ(double(to_float(f16{0xFC00})), -infinity);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(nan))));
  EXPECT_TRUE(std::isnan(to_float(to_f16(nan))));
  // A payload in the low bits only must not become infinity.
  EXPECT_TRUE(std::isnan(to_float(to_f16(std::bit_cast<double>(0x7FF0000000000001)))));
  EXPECT_TRUE(std::isnan(to_float(f16{0x7D5A})));
  EXPECT_TRUE(std::isnan(to_float(bf16{0x7FA1})));
}

TEST(DType, KnownHalves) {
  EXPECT_EQ(to_float(f16{0x3555}), 0.333251953125f);  // IEEE 754 binary16, nearest to 1/3
  EXPECT_EQ(to_float(f16{0x0001}), 0x1p-24f);
  EXPECT_EQ(to_float(f16{0x03FF}), 1023 * 0x1p-24f);
  EXPECT_EQ(to_float(f16{0x7BFF}), 65504.0f);
  EXPECT_EQ(to_float(bf16{0x4049}), 3.140625f);  // nearest to pi
  EXPECT_EQ(to_float(bf16{0x0001}), 0x1p-133f);
  EXPECT_EQ(to_bf16(3.14159265358979).bits, 0x4049);
  EXPECT_EQ(to_f16(1.0 / 3).bits, 0x3555);
}

TEST(DType, StoreRoundsOnceAndLoadReadsBack) {
  std::byte element[8] = {};
  for (DType dtype : all_dtypes) {
    store(element, dtype, -3);
    EXPECT_EQ(load(element, dtype), -3) << name(dtype);
    EXPECT_EQ(round_to(-3, dtype), -3);
  }
  store(element, DType::f32, 1 + 0x1p-24 + 0x1p-50);
  EXPECT_EQ(load(element, DType::f32), 1 + 0x1p-23);
  for (auto [value, want] : {std::pair{2.5, 2.0}, {3.5, 4.0}, {-2.5, -2.0}, {-0.75, -1.0}}) {
    store(element, DType::i32, value);
    EXPECT_EQ(load(element, DType::i32), want);
    EXPECT_EQ(round_to(value, DType::i64), want);
  }
  EXPECT_EQ(round_to(1e300, DType::i32), 2147483647.0);
  EXPECT_EQ(round_to(2147483647.5, DType::i32), 2147483647.0);
  EXPECT_EQ(round_to(-1e300, DType::i32), -2147483648.0);
  EXPECT_EQ(round_to(-1e300, DType::i64), -0x1p63);
  EXPECT_EQ(round_to(std::nan(""), DType::i32), -2147483648.0);
}

// ---- Views

TEST(View, FlatNumbersFollowStrides) {
  int32_t numbers[12];
  std::iota(numbers, numbers + 12, 0);
  View view = view_of(reinterpret_cast<std::byte*>(numbers), DType::i32, {3, 4});
  EXPECT_EQ(view.strides, (Ints{4, 1}));
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.bytes(), 48);
  EXPECT_EQ(load(view.at(Ints{2, 1}), DType::i32), 9);
  const View columns = view.narrow(1, 1, 2);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(to_doubles(columns), (std::vector<double>{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(load(columns.flat(3), DType::i32), 6);
  const View rows = view.narrow(0, 1, 2);
  EXPECT_TRUE(rows.contiguous());
  EXPECT_EQ(rows.as<int32_t>()[0], 4);
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.strides[0], view.strides[1]);
  EXPECT_EQ(to_doubles(view), (std::vector<double>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
}

TEST(View, ContiguityIgnoresStridesOfExtentOne) {
  double data[6] = {};
  View view = {
      reinterpret_cast<std::byte*>(data), DType::f64, Space::host, {1, 3, 1, 2}, {99, 2, 77, 1}};
  EXPECT_TRUE(view.contiguous());
  view.strides[1] = 3;
  EXPECT_FALSE(view.contiguous());
  view.shape[2] = 0;
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.elements(), 0);
  EXPECT_EQ(View().elements(), 0);
  view.shape = view.strides = {};
  EXPECT_EQ(view.elements(), 1);
  EXPECT_EQ(to_doubles(view), std::vector<double>{0});
}

TEST(View, RefusesWhatTheCallerDidNotAssume) {
  float data[6] = {};
  View view = view_of(reinterpret_cast<std::byte*>(data), DType::f32, {2, 3});
  EXPECT_NO_THROW(view.as<float>());
  EXPECT_COMPLAINT(view.as<double>(), "f64");
  EXPECT_THROW(view.as<double>(), std::invalid_argument);
  EXPECT_COMPLAINT(view.narrow(1, 0, 2).as<float>(), "contiguous");
  EXPECT_NO_THROW(view.narrow(1, 0, 2).strided<float>());
  EXPECT_COMPLAINT(view.narrow(1, 2, 2), "length 2");
  EXPECT_COMPLAINT(view.narrow(2, 0, 1), "dim 2");
  EXPECT_COMPLAINT(view.narrow(0, -1, 1), "start -1");
  EXPECT_COMPLAINT(view.flat(6), "below 6");
  EXPECT_COMPLAINT(view.at(Ints{0, 3}), "[0,3]");
  EXPECT_COMPLAINT(view.at(Ints{0}), "2 indices");
  EXPECT_COMPLAINT(fill_from(view, std::vector<double>(5)), "6 values");
  View other = view.narrow(1, 0, 2);
  EXPECT_COMPLAINT(copy(view, other), "[2,2]");
  other = view;
  other.dtype = DType::i32;
  EXPECT_COMPLAINT(copy(view, other), "i32");
  view.space = Space::device;
  EXPECT_COMPLAINT(view.as<float>(), "device");
  EXPECT_COMPLAINT(to_doubles(view), "device");
}

TEST(View, CopiesKeepEveryBit) {
  for (DType dtype : all_dtypes) {
    for (auto from_strides : {Strides::contiguous, Strides::transposed}) {
      for (auto to_strides : {Strides::contiguous, Strides::transposed}) {
        const Buffer from(dtype, {2, 3, 4}, from_strides), to(dtype, {6, 4}, to_strides);
        for (int64_t i = 0; i < 24; i += 2) store(from.view().flat(i), dtype, double(i + 1));
        for (int64_t i = 0; i < 24; ++i) store(to.view().flat(i), dtype, 0);
        copy(from.view(), to.view());
        for (int64_t i = 0; i < 24; ++i) {
          const uint64_t met = bits_of(to.view().flat(i), dtype);
          if (i % 2) {  // still the signalling NaN, not its quiet cousin
            EXPECT_EQ(met, poison_bits(dtype));
          } else {
            EXPECT_EQ(load(to.view().flat(i), dtype), double(i + 1));
          }
        }
        EXPECT_EQ(from.bytes(), to.bytes());
        EXPECT_FALSE(from.trespass());
        EXPECT_FALSE(to.trespass());
      }
    }
  }
}

TEST(View, ValuesGoInAndComeBack) {
  for (DType dtype : all_dtypes) {
    for (auto strides : {Strides::contiguous, Strides::transposed}) {
      const Buffer buffer(dtype, {3, 2, 2}, strides);
      std::vector<double> values(12);
      std::iota(values.begin(), values.end(), -5.0);
      fill_from(buffer.view(), values);
      EXPECT_EQ(to_doubles(buffer.view()), values);
      EXPECT_EQ(load(buffer.view().at(Ints{2, 0, 1}), dtype), values[9]);
      EXPECT_FALSE(buffer.trespass());
    }
  }
}

// ---- Buffers

TEST(Buffer, PoisonIsASignallingNaN) {
  EXPECT_EQ(poison_bits(DType::f64), 0x7FF4DEADBEEF5AFEu);
  EXPECT_EQ(poison_bits(DType::f32), 0x7FA0DEADu);
  EXPECT_EQ(poison_bits(DType::bf16), 0x7FA1u);
  EXPECT_EQ(poison_bits(DType::f16), 0x7D5Au);
  EXPECT_EQ(poison_bits(DType::i64), 0x5AFE5AFE5AFE5AFEu);
  EXPECT_EQ(poison_bits(DType::i32), 0x5AFE5AFEu);
  // Exponent all ones, quiet bit clear, fraction not zero.
  EXPECT_EQ(poison_bits(DType::f64) >> 51, 0xFFEu);
  EXPECT_EQ(poison_bits(DType::f32) >> 22, 0x1FEu);
  EXPECT_EQ(poison_bits(DType::bf16) >> 6, 0x1FEu);
  EXPECT_EQ(poison_bits(DType::f16) >> 9, 0x3Eu);
}

TEST(Buffer, KnowsWhatWasNotWritten) {
  for (DType dtype : all_dtypes) {
    for (auto strides : {Strides::contiguous, Strides::transposed}) {
      Buffer buffer(dtype, {3, 5}, strides);
      EXPECT_EQ(buffer.unwritten().count, 15) << name(dtype);
      EXPECT_EQ(buffer.unwritten().first, 0);
      for (int64_t i = 0; i < 15; ++i) {
        if (i != 7 && i != 11) store(buffer.view().flat(i), dtype, 1);
      }
      EXPECT_EQ(buffer.unwritten().count, 2);
      EXPECT_EQ(buffer.unwritten().first, 7);
      fill_from(buffer.view(), std::vector<double>(15, 2));
      EXPECT_EQ(buffer.unwritten().count, 0);
      EXPECT_EQ(buffer.unwritten().first, -1);
      buffer.poison();
      EXPECT_EQ(buffer.unwritten().count, 15);
    }
  }
}

TEST(Buffer, NoContiguousReadingSurvivesTransposedStorage) {
  const auto strides = [](Ints shape) {
    return Buffer(DType::f32, std::move(shape), Strides::transposed).view().strides;
  };
  EXPECT_EQ(strides({2, 3}), (Ints{1, 3}));
  EXPECT_EQ(strides({2, 3, 4}), (Ints{1, 3, 9}));
  EXPECT_EQ(strides({4}), (Ints{2}));
  for (const Ints& shape : {Ints{7}, {1, 5}, {5, 1}, {1, 5, 1}, {2, 3}, {2, 3, 4}, {3, 1, 2, 2}}) {
    const Buffer buffer(DType::bf16, shape, Strides::transposed);
    EXPECT_FALSE(buffer.view().contiguous()) << shape_text(shape);
    std::set<const std::byte*> places;
    for (int64_t i = 0; i < buffer.view().elements(); ++i) places.insert(buffer.view().flat(i));
    EXPECT_EQ(int64_t(places.size()), buffer.view().elements());
    EXPECT_GT(int64_t(buffer.snapshot().size()), buffer.view().bytes() + 2 * Buffer::guard_bytes);
  }
}

// What copies the guard of one buffer onto that of another would leave a zone of equal bytes. bf16
// marks an element with 4 bits: of 2n elements n are equal by chance once in 2^2n 16^-n times at
// most, n = 32.
TEST(Buffer, GuardsOfTwoBuffersDiffer) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32}) {
    const Buffer one(dtype, {3}), other(dtype, {3});
    const int64_t size = size_of(dtype), middle = one.view().bytes();
    for (const int64_t zone : {-Buffer::guard_bytes, middle}) {
      const std::byte *a = one.view().data + zone, *b = other.view().data + zone;
      int64_t differ = 0;
      for (int64_t at = 0; at < Buffer::guard_bytes; at += size)
        differ += !std::equal(a + at, a + at + size, b + at);
      EXPECT_GT(2 * differ * size, Buffer::guard_bytes) << name(dtype) << " at " << zone;
    }
  }
}

TEST(Buffer, EveryByteOutsideTheElementsIsGuarded) {
  for (auto strides : {Strides::contiguous, Strides::transposed}) {
    Buffer buffer(DType::f32, {3, 2}, strides);
    fill_from(buffer.view(), std::vector<double>{1, 2, 3, 4, 5, 6});
    std::set<const std::byte*> owned;
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t b = 0; b < 4; ++b) owned.insert(buffer.view().flat(i) + b);
    }
    const auto middle = int64_t(buffer.snapshot().size()) - 2 * Buffer::guard_bytes;
    EXPECT_EQ(middle, strides == Strides::contiguous ? 24 : 32);
    for (int64_t byte = -Buffer::guard_bytes; byte < middle + Buffer::guard_bytes; ++byte) {
      std::byte* at = buffer.view().data + byte;
      *at ^= std::byte{1};
      const auto met = buffer.trespass();
      *at ^= std::byte{1};
      if (owned.count(at)) {
        EXPECT_FALSE(met) << byte;
      } else if (byte < 0) {
        ASSERT_TRUE(met) << byte;
        EXPECT_EQ(met->where, "before");
        EXPECT_EQ(met->byte, byte + Buffer::guard_bytes);
      } else if (byte >= middle) {
        ASSERT_TRUE(met) << byte;
        EXPECT_EQ(met->where, "after");
        EXPECT_EQ(met->byte, byte - middle);
      } else {
        ASSERT_TRUE(met) << byte;
        EXPECT_EQ(met->where, "gap");
        EXPECT_EQ(met->byte, byte);
      }
    }
    EXPECT_FALSE(buffer.trespass());
  }
}

TEST(Buffer, NamesTheElementThatChanged) {
  for (auto strides : {Strides::contiguous, Strides::transposed}) {
    Buffer buffer(DType::f64, {2, 3}, strides);
    fill_from(buffer.view(), std::vector<double>{0, 1, 2, 3, 4, 5});
    const auto before = buffer.snapshot();
    EXPECT_FALSE(buffer.changed_since(before));
    store(buffer.view().flat(0), DType::f64, -0.0);  // equal as a value, not as bytes
    EXPECT_EQ(buffer.changed_since(before), 0);
    store(buffer.view().flat(0), DType::f64, 0.0);
    store(buffer.view().flat(4), DType::f64, 9);
    store(buffer.view().flat(5), DType::f64, 9);
    EXPECT_EQ(buffer.changed_since(before), 4);
    fill_from(buffer.view(), std::vector<double>{0, 1, 2, 3, 4, 5});
    buffer.view().data[-1] ^= std::byte{1};
    EXPECT_EQ(buffer.changed_since(before), -1);
    EXPECT_COMPLAINT(buffer.changed_since({}), "another buffer");
  }
}

// PyTorch's strides of torch.empty(2, 1, 4).expand(2, 3, 4), and of a sum's cotangent.
TEST(Buffer, ExpandedDimsShowOneValueThatADenseReadingMisses) {
  const std::vector<int> middle{1}, all{0, 1, 2};
  Buffer heads(DType::f64, {2, 3, 4}, middle), one(DType::f32, {2, 3, 4}, all);
  EXPECT_EQ(heads.view().strides, (Ints{4, 0, 1}));
  EXPECT_EQ(one.view().strides, (Ints{0, 0, 0}));
  std::vector<double> values;
  for (int row = 0; row < 2; ++row)
    for (int head = 0; head < 3; ++head)
      for (int i = 0; i < 4; ++i) values.push_back(10 * row + i);
  fill_from(heads.view(), values);
  fill_from(one.view(), std::vector<double>(24, 7));
  EXPECT_EQ(to_doubles(heads.view()), values);
  EXPECT_EQ(to_doubles(one.view()), std::vector<double>(24, 7));
  for (const Buffer* b : {&heads, &one}) {
    EXPECT_EQ(b->unwritten().count, 0);
    EXPECT_FALSE(b->trespass());
    const View dense = view_of(b->view().data, b->view().dtype, b->view().shape);
    const auto read = to_doubles(dense);
    EXPECT_TRUE(std::isnan(read.back()));
    const auto before = b->snapshot();
    store(dense.flat(23), dense.dtype, 1);
    EXPECT_EQ(b->changed_since(before), -1);
  }
}

TEST(Buffer, MovesWithItsView) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 5; ++i) {
    buffers.emplace_back(DType::i64, Ints{3}, Strides::transposed);
    fill_from(buffers.back().view(), std::vector<double>(3, i));
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(to_doubles(buffers[size_t(i)].view()), std::vector<double>(3, i));
    EXPECT_FALSE(buffers[size_t(i)].trespass());
  }
}

TEST(Buffer, EmptyTensorsAndScalars) {
  for (auto strides : {Strides::contiguous, Strides::transposed}) {
    for (const Ints& shape : {Ints{0}, {0, 3}, {3, 0}, {2, 0, 3}}) {
      const Buffer empty(DType::f32, shape, strides);
      EXPECT_EQ(empty.view().elements(), 0);
      EXPECT_EQ(empty.unwritten().count, 0);
      EXPECT_FALSE(empty.trespass());
      EXPECT_TRUE(to_doubles(empty.view()).empty());
    }
    const Buffer scalar(DType::f32, {}, strides);
    EXPECT_EQ(scalar.unwritten().count, 1);
    fill_from(scalar.view(), std::vector<double>{3});
    EXPECT_EQ(to_doubles(scalar.view()), std::vector<double>{3});
    EXPECT_FALSE(scalar.trespass());
  }
  EXPECT_FALSE(Buffer().trespass());
  EXPECT_EQ(Buffer().unwritten().count, 0);
}

// ---- Placements and index maps

TEST(Placement, DualsAreInvolutions) {
  const std::string types = "IRPSV", duals = "IPRSV";
  const std::vector<Placement> all = {I(), R(), P(), S(1), V()};
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(letter(all[i]), types[i]);
    EXPECT_EQ(letter(dual(all[i])), duals[i]);
    EXPECT_EQ(letter(dual(dual(all[i]))), types[i]);
  }
  EXPECT_EQ(dual(S(1, uneven_map())).dim, 1);
  EXPECT_EQ(dual(S(1, uneven_map())).map, &uneven_map());
}

TEST(Placement, LayoutsAsText) {
  const Layout layout = {{Axis::cp, S(0)}, {Axis::tp, S(1, uneven_map())}, {Axis::dp, R()}};
  EXPECT_EQ(text(layout), "cp:S(0) tp:S(1,uneven) dp:R");
  EXPECT_EQ(text(dual(layout)), "cp:S(0) tp:S(1,uneven) dp:P");
  EXPECT_EQ(text(Layout{}), "");
  EXPECT_EQ(letter(placement_on(layout, Axis::dp)), 'R');
  EXPECT_EQ(letter(placement_on(layout, Axis::pp)), 'V');  // not named: data of its own
  for (const char* word : {"tp", "cp", "dp", "ep", "pp"})
    EXPECT_STREQ(name(*axis_from(word)), word);
  EXPECT_FALSE(axis_from("xp"));
}

Ints extents_of(const IndexMap& map, int64_t extent, int ranks) {
  Ints extents;
  for (int r = 0; r < ranks; ++r) extents.push_back(int64_t(map.owned(extent, ranks, r).size()));
  return extents;
}

TEST(IndexMap, BlocksByHand) {
  EXPECT_EQ(extents_of(contiguous_map(), 12, 4), (Ints{3, 3, 3, 3}));
  EXPECT_EQ(extents_of(contiguous_map(), 7, 3), (Ints{3, 2, 2}));
  EXPECT_EQ(extents_of(contiguous_map(), 2, 3), (Ints{1, 1, 0}));
  EXPECT_EQ(contiguous_map().owned(7, 3, 1), (Ints{3, 4}));
  // 12 in shares of 1 to 4 tenths: 1.2 2.4 3.6 4.8; the floors leave 2, the remainders .6 and .8
  // get them.
  EXPECT_EQ(extents_of(uneven_map(), 12, 4), (Ints{1, 2, 4, 5}));
  EXPECT_EQ(extents_of(uneven_map(), 7, 3), (Ints{1, 2, 4}));  // 1.17 2.33 3.5
  EXPECT_EQ(extents_of(uneven_map(), 6, 3), (Ints{1, 2, 3}));
  EXPECT_EQ(extents_of(uneven_map(), 9, 3), (Ints{1, 3, 5}));  // 1.5 3 4.5: the later of equals
  EXPECT_EQ(extents_of(uneven_map(), 3, 3), (Ints{1, 1, 1}));  // 0.5 1 1.5: rank 0 takes one
  EXPECT_EQ(extents_of(uneven_map(), 2, 3), (Ints{0, 1, 1}));  // 0.33 0.67 1
  EXPECT_EQ(uneven_map().owned(12, 4, 2), (Ints{3, 4, 5, 6}));
  EXPECT_COMPLAINT(uneven_map().owned(12, 4, 4), "rank 4 of 4");
}

TEST(IndexMap, GroupsStayWhole) {
  // Five groups of two rows on three ranks: 2, 2, 1.
  EXPECT_EQ(groups_map(2).owned(10, 3, 0), (Ints{0, 1, 2, 3}));
  EXPECT_EQ(groups_map(2).owned(10, 3, 1), (Ints{4, 5, 6, 7}));
  EXPECT_EQ(groups_map(2).owned(10, 3, 2), (Ints{8, 9}));
  for (int r : {0, 1, 2})
    EXPECT_EQ(groups_map(1).owned(10, 3, r), contiguous_map().owned(10, 3, r));
}

TEST(IndexMap, RanksPartitionTheExtent) {
  for (const IndexMap* map : {&contiguous_map(), &uneven_map()}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (int64_t extent = 0; extent <= 40; ++extent) {
        Ints all;
        for (int r = 0; r < ranks; ++r) {
          const Ints own = map->owned(extent, ranks, r);
          if (extent >= ranks) {
            EXPECT_FALSE(own.empty()) << map->name << ' ' << extent << ' ' << ranks;
          }
          all.insert(all.end(), own.begin(), own.end());
        }
        EXPECT_EQ(all, iota(extent)) << map->name << ' ' << extent << ' ' << ranks;
      }
    }
  }
}

// ---- Meshes: the tables of Megatron-LM's parallel_state.py

TEST(Mesh, GroupsOfTp4Cp2) {
  const Mesh mesh({{Axis::tp, 4}, {Axis::cp, 2}});
  EXPECT_EQ(mesh.world(), 8);
  EXPECT_EQ(mesh.groups({Axis::tp}), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(mesh.groups({Axis::cp}), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(mesh.groups({Axis::dp}), (Groups{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
  EXPECT_EQ(mesh.groups({Axis::cp, Axis::dp}), mesh.groups({Axis::cp}));
}

TEST(Mesh, GroupsOfTp2Cp4) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 4}});
  EXPECT_EQ(mesh.groups({Axis::tp}), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(mesh.groups({Axis::cp}), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(mesh.groups({Axis::dp}), (Groups{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
  EXPECT_EQ(mesh.groups({Axis::cp, Axis::dp}), mesh.groups({Axis::cp}));
}

TEST(Mesh, GroupsOfTp2Cp2Dp2) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 2}, {Axis::dp, 2}});
  EXPECT_EQ(mesh.groups({Axis::tp}), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(mesh.groups({Axis::cp}), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(mesh.groups({Axis::dp}), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(mesh.groups({Axis::cp, Axis::dp}), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  // The same sets with the first axis named running fastest.
  EXPECT_EQ(mesh.groups({Axis::dp, Axis::cp}), (Groups{{0, 4, 2, 6}, {1, 5, 3, 7}}));
}

TEST(Mesh, GroupsOfTp2Cp2AndTp2Ep4) {
  const Mesh four({{Axis::tp, 2}, {Axis::cp, 2}});
  EXPECT_EQ(four.groups({Axis::tp}), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(four.groups({Axis::cp}), (Groups{{0, 2}, {1, 3}}));
  EXPECT_EQ(four.groups({Axis::cp, Axis::dp}), four.groups({Axis::cp}));
  const Mesh experts({{Axis::tp, 2}, {Axis::ep, 4}});
  EXPECT_EQ(experts.groups({Axis::tp}), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(experts.groups({Axis::ep}), (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}}));
}

TEST(Mesh, TheOrderDecides) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 4}}, {Axis::cp, Axis::tp});
  EXPECT_EQ(mesh.groups({Axis::cp}), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(mesh.groups({Axis::tp}), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(mesh.coordinate(6, Axis::tp), 1);
  EXPECT_EQ(mesh.coordinate(6, Axis::cp), 2);
  // An axis that the order leaves out comes after those that it names.
  const Mesh rest({{Axis::tp, 2}, {Axis::dp, 2}}, {Axis::cp});
  EXPECT_EQ(rest.groups({Axis::tp}), (Groups{{0, 1}, {2, 3}}));
}

TEST(Mesh, RankIsTheMixedRadixNumberOfItsCoordinates) {
  const std::map<Axis, int> n = {
      {Axis::tp, 2}, {Axis::cp, 3}, {Axis::ep, 2}, {Axis::dp, 2}, {Axis::pp, 2}};
  const Mesh mesh(n);
  for (int rank = 0; rank < mesh.world(); ++rank) {
    const auto at = [&](Axis axis) { return mesh.coordinate(rank, axis); };
    EXPECT_EQ(rank,
              at(Axis::tp) +
                  2 * (at(Axis::cp) + 3 * (at(Axis::ep) + 2 * (at(Axis::dp) + 2 * at(Axis::pp)))));
  }
}

TEST(Mesh, GroupsPartitionAndCrossOnce) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 3}, {Axis::dp, 2}, {Axis::pp, 2}});
  const std::vector<Axis> axes = Mesh::default_order();
  for (Axis axis : axes) {
    std::multiset<int> members;
    for (const auto& group : mesh.groups({axis})) members.insert(group.begin(), group.end());
    EXPECT_EQ(int(members.size()), mesh.world());
    for (int rank = 0; rank < mesh.world(); ++rank) {
      EXPECT_EQ(members.count(rank), 1u);
      const std::vector<int> group = mesh.group({axis}, rank);
      EXPECT_EQ(group[size_t(mesh.coordinate(rank, axis))], rank);
      for (Axis other : axes) {
        if (other == axis) continue;
        const std::vector<int> crossing = mesh.group({other}, rank);
        EXPECT_EQ(
            std::count_if(group.begin(), group.end(),
                          [&](int r) { return std::count(crossing.begin(), crossing.end(), r); }),
            1);
      }
    }
  }
  EXPECT_EQ(mesh.groups({}).size(), size_t(mesh.world()));
}

TEST(Mesh, RefusesWhatIsNoMesh) {
  EXPECT_EQ(Mesh().world(), 1);
  EXPECT_EQ(Mesh().group({Axis::tp}, 0), std::vector<int>{0});
  EXPECT_COMPLAINT(Mesh({{Axis::tp, 0}}), "tp");
  EXPECT_COMPLAINT(Mesh({}, {Axis::tp, Axis::tp}), "tp 2 times");
  EXPECT_COMPLAINT(Mesh().coordinate(1, Axis::tp), "below 1");
  EXPECT_COMPLAINT(Mesh().group({Axis::cp, Axis::cp}, 0), "cp twice");
  EXPECT_COMPLAINT(Mesh({{Axis::tp, 1 << 20}, {Axis::cp, 1 << 20}}), "2^31");
}

// ---- Numbers

TEST(Random, PhiloxKnownAnswers) {  // Random123's kat_vectors, philox4x32 10
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, NameHashKnownAnswers) {  // published FNV-1a test vectors
  EXPECT_EQ(name_hash(""), 0xcbf29ce484222325u);
  EXPECT_EQ(name_hash("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(name_hash("foobar"), 0x85944171f73967e8u);
}

TEST(Random, EveryWordOfSeedNameAndIndexCounts) {
  EXPECT_EQ(Stream123(7, "x").bits(0),
            (std::array<uint64_t, 2>{0x23a19b2d1e436903, 0xda5eff51b3261ed9}));
  const std::array<Draw, 2> seeds = {Draw{.seed = 7}, Draw{.seed = 7 + (uint64_t(1) << 32)}};
  // From the separate program: indices past 2^32, and a seed that differs in its high word only.
  const double high_index[] = {-2, 2, 1, 3}, high_seed[] = {-2, -1, 2, 2};
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(draw(seeds[0], "x", DType::f64, Ints{8}, (int64_t(1) << 32) + i), high_index[i]);
    EXPECT_EQ(draw(seeds[1], "x", DType::f64, Ints{8}, i), high_seed[i]);
  }
  EXPECT_NE(Stream123(7, "x").bits(0), Stream123(7, "y").bits(0));
}

TEST(Random, NormalIsBoxMuller) {
  const Stream123 stream(3, "w");
  const double pi = std::acos(-1.0);
  double sum = 0, squares = 0;
  const int n = 40000;
  for (int i = 0; i < n; ++i) {
    const auto [first, second] = stream.bits(uint64_t(i));
    const double u = double((first >> 11) + 1) * 0x1p-53;
    const double t = double(second >> 10 & ((uint64_t(1) << 53) - 1)) * 0x1p-53;
    const double by_libm = std::sqrt(-2 * std::log(u)) * std::cos(pi / 2 * t);
    const double value = stream.normal(uint64_t(i));
    // Both series end far below the last bit: what parts the two is a few roundings.
    EXPECT_NEAR(std::abs(value), by_libm, 8 * 0x1p-53 * (1 + std::sqrt(-2 * std::log(u))));
    EXPECT_EQ(std::signbit(value), bool(second >> 63));
    sum += value;
    squares += value * value;
  }
  EXPECT_LT(std::abs(sum / n), 5 / std::sqrt(n));                // 5 standard deviations
  EXPECT_LT(std::abs(squares / n - 1), 5 * std::sqrt(2.0 / n));  // of mean and variance
}

TEST(Random, UniformAndBelowStayInside) {
  const Stream123 stream(5, "u");
  double sum = 0;
  const int n = 20000;
  for (int i = 0; i < n; ++i) {
    const double value = stream.uniform(uint64_t(i));
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    sum += value;
    const int64_t choice = stream.below(uint64_t(i), 7);
    ASSERT_EQ(choice,
              int64_t(std::floor(std::ldexp(double(stream.bits(uint64_t(i))[0] >> 11), -53) * 7)));
  }
  EXPECT_LT(std::abs(sum / n - 0.5), 5 / std::sqrt(12.0 * n));
  EXPECT_EQ(stream.below(0, 1), 0);
  EXPECT_COMPLAINT(stream.below(0, 0), "met 0");
}

// ---- Fills

TEST(Fills, Names) {
  for (const char* word : {"integers", "normal", "large", "cancelling", "offset"}) {
    EXPECT_STREQ(name(*fill_from(word)), word);
  }
  EXPECT_FALSE(fill_from("ones"));
}

using Values = std::vector<double>;

Values first_eight(Fill fill, DType dtype) {
  return draw_whole({.fill = fill, .seed = 7, .range = 3}, "x", dtype, Ints{8});
}

TEST(Fills, PinnedIntegers) {
  const Values want = {-3, 2, -3, 1, 2, 2, 1, -3};
  for (DType dtype : all_dtypes) EXPECT_EQ(first_eight(Fill::integers, dtype), want);
}

TEST(Fills, PinnedNormal) {
  EXPECT_EQ(first_eight(Fill::normal, DType::f64),
            (Values{-0x1.c50593ccf41afp-1, 0x1.8b97904b1bd0ap-1, 0x1.33d083c77986cp+0,
                    -0x1.e9ca8241c4819p-1, -0x1.ec56325b0027ep-2, -0x1.fd5ae9f997dccp-2,
                    -0x1.e99d69da0a67bp-1, -0x1.11cbe4a4aaeaep+1}));
  EXPECT_EQ(first_eight(Fill::normal, DType::bf16),
            (Values{-0x1.c6p-1, 0x1.8cp-1, 0x1.34p+0, -0x1.eap-1, -0x1.ecp-2, -0x1.fep-2,
                    -0x1.eap-1, -0x1.12p+1}));
}

// All bits of 4096 numbers, as the sum of their patterns modulo 2^64: a change of the formulas that
// moves the last bit of one of them shows here.
TEST(Fills, PinnedBitsOfManyNormals) {
  uint64_t sum = 0;
  for (double v : draw_whole({.fill = Fill::normal, .seed = 7}, "x", DType::f64, Ints{4096})) {
    sum += std::bit_cast<uint64_t>(v);
  }
  EXPECT_EQ(sum, 0x356e7cff729a7afu);
}

TEST(Fills, PinnedLarge) {
  EXPECT_EQ(first_eight(Fill::large, DType::f64),
            (Values{-0x1.c50593ccf41afp+19, 0x1.8b97904b1bd0ap+19, 0x1.33d083c77986cp+20,
                    -0x1.e9ca8241c4819p+19, -0x1.ec56325b0027ep+18, -0x1.fd5ae9f997dccp+18,
                    -0x1.e99d69da0a67bp+19, -0x1.11cbe4a4aaeaep+21}));
  EXPECT_EQ(first_eight(Fill::large, DType::bf16),
            (Values{-0x1.c6p+19, 0x1.8cp+19, 0x1.34p+20, -0x1.eap+19, -0x1.ecp+18, -0x1.fep+18,
                    -0x1.eap+19, -0x1.12p+21}));
  // f16 would overflow: 2^6 there.
  EXPECT_EQ(draw({.fill = Fill::large, .seed = 7}, "x", DType::f16, Ints{8}, 0),
            round_to(-0x1.c50593ccf41afp-1 * 64, DType::f16));
}

TEST(Fills, PinnedCancelling) {
  EXPECT_EQ(first_eight(Fill::cancelling, DType::f64),
            (Values{-0x1.c50593ccf41afp-1, 0x1.c88f9ef48e032p-1, 0x1.33d083c77986cp+0,
                    -0x1.363824cf0879dp+0, -0x1.ec56325b0027ep-2, 0x1.f02edebfb6283p-2,
                    -0x1.e99d69da0a67bp-1, 0x1.ed70a4adbe7c8p-1}));
  EXPECT_EQ(first_eight(Fill::cancelling, DType::bf16),
            (Values{-0x1.c6p-1, 0x1.c8p-1, 0x1.34p+0, -0x1.36p+0, -0x1.ecp-2, 0x1.fp-2, -0x1.eap-1,
                    0x1.eep-1}));
}

TEST(Fills, PinnedOffset) {
  EXPECT_EQ(first_eight(Fill::offset, DType::f64),
            (Values{0x1.ffffff8ebe9b1p+25, 0x1.0000003172f21p+26, 0x1.0000004cf420fp+26,
                    0x1.ffffff858d5f7p+25, 0x1.ffffffc27539bp+25, 0x1.ffffffc054a2cp+25,
                    0x1.ffffff8598a59p+25, 0x1.fffffeee341b6p+25}));
  EXPECT_EQ(first_eight(Fill::offset, DType::f32),
            (Values{0x1.ffe3bp+11, 0x1.000c5cp+12, 0x1.00133ep+12, 0x1.ffe164p+11, 0x1.fff09ep+11,
                    0x1.fff016p+11, 0x1.ffe166p+11, 0x1.ffbb8ep+11}));
  EXPECT_EQ(first_eight(Fill::offset, DType::bf16),
            (Values{0x1.e4p+3, 0x1.0cp+4, 0x1.14p+4, 0x1.e2p+3, 0x1.fp+3, 0x1.fp+3, 0x1.e2p+3,
                    0x1.bcp+3}));
}

TEST(Fills, PairsCancelAlongTheContraction) {
  const Ints shape = {3, 5, 2};
  const Values x =
      draw_whole({.fill = Fill::cancelling, .seed = 2, .contraction = 1}, "w", DType::f64, shape);
  const Values plain = draw_whole({.fill = Fill::normal, .seed = 2}, "w", DType::f64, shape);
  const auto at = [](int64_t i, int64_t j, int64_t k) { return size_t((i * 5 + j) * 2 + k); };
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t k = 0; k < 2; ++k) {
      for (int64_t j : {0, 2, 4}) EXPECT_EQ(x[at(i, j, k)], plain[at(i, j, k)]);
      for (int64_t j : {1, 3}) EXPECT_EQ(x[at(i, j, k)], -x[at(i, j - 1, k)] * 1.0078125);
    }
  }
  EXPECT_COMPLAINT(draw({.fill = Fill::cancelling, .contraction = 3}, "w", DType::f64, shape, 0),
                   "dim 3");
}

TEST(Fills, IntegersAreUniformWithoutZero) {
  std::map<double, int> counts;
  const int n = 60000;
  for (double v : draw_whole({.seed = 11, .range = 3}, "q", DType::f64, Ints{n})) ++counts[v];
  EXPECT_EQ(counts.size(), 6u);
  EXPECT_EQ(counts.count(0), 0u);
  const double deviation = std::sqrt(n * (1.0 / 6) * (5.0 / 6));
  for (auto [value, count] : counts) {
    EXPECT_LE(std::abs(value), 3);
    EXPECT_NEAR(count, n / 6.0, 5 * deviation) << value;
  }
  EXPECT_COMPLAINT(draw({.range = 0}, "q", DType::f64, Ints{1}, 0), "met 0");
}

TEST(Fills, NothingIsZeroAndEverythingIsStorable) {
  for (DType dtype : all_dtypes) {
    for (Fill fill : {Fill::integers, Fill::normal, Fill::large, Fill::cancelling, Fill::offset}) {
      const Draw d = {.fill = fill, .seed = 13};
      for (double v : draw_whole(d, "t", dtype, Ints{50, 40})) {
        ASSERT_NE(v, 0);
        ASSERT_TRUE(std::isfinite(v));
        ASSERT_EQ(round_to(v, dtype), v);
      }
    }
  }
  // At this index the normal number is -0x1.46p-27 (the separate program), nearer to 0 in f16 than
  // to its smallest subnormal.
  EXPECT_EQ(draw({.fill = Fill::normal, .seed = 7}, "x", DType::f16, Ints{1 << 28}, 191277969),
            -0x1p-24);
  EXPECT_EQ(draw({.fill = Fill::normal, .seed = 7}, "x", DType::f64, Ints{1 << 28}, 191277969),
            -0x1.4638bae217e29p-27);
}

TEST(Fills, ExactRange) {
  EXPECT_EQ(exact_range(DType::f32, 1864135, 2), 3);  // 2^24 / 9 = 1864135.1
  EXPECT_EQ(exact_range(DType::f32, 1864136, 2), 2);
  EXPECT_EQ(exact_range(DType::f64, 4096, 2), 1000);  // the cap
  EXPECT_EQ(exact_range(DType::bf16, 64, 2), 2);      // 64 * 4 = 2^8
  EXPECT_EQ(exact_range(DType::bf16, 65, 2), 1);
  EXPECT_EQ(exact_range(DType::bf16, 256, 2), 1);
  EXPECT_EQ(exact_range(DType::bf16, 257, 2), std::nullopt);
  EXPECT_EQ(exact_range(DType::bf16, 3, 1), 85);  // p B <= 256
  EXPECT_EQ(exact_range(DType::bf16, 8, 1), 32);
  EXPECT_EQ(exact_range(DType::f16, 28, 2), 8);   // 28 * 64 = 1792 <= 2048 < 28 * 81
  EXPECT_EQ(exact_range(DType::i32, 3, 3), 894);  // 3 * 894^3 <= 2^31 < 3 * 895^3
  EXPECT_EQ(exact_range(DType::i64, 1, 9), 128);  // 128^9 = 2^63
  EXPECT_COMPLAINT(exact_range(DType::f32, 0, 2), "0 terms");
}

// ---- Sharding

TEST(Sharding, TheOutermostAxisCutsFirst) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 2}});  // rank = t + 2c
  const Layout cp_first = {{Axis::cp, S(0)}, {Axis::tp, S(0)}};
  const Layout tp_first = {{Axis::tp, S(0)}, {Axis::cp, S(0)}};
  const std::vector<Ints> by_cp = {{0, 1}, {2, 3}, {4, 5}, {6, 7}};
  const std::vector<Ints> by_tp = {{0, 1}, {4, 5}, {2, 3}, {6, 7}};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(whole_indices(Ints{8}, cp_first, mesh, rank), by_cp[size_t(rank)]);
    EXPECT_EQ(whole_indices(Ints{8}, tp_first, mesh, rank), by_tp[size_t(rank)]);
  }
}

TEST(Sharding, InnerDims) {
  const Mesh mesh({{Axis::tp, 2}});
  EXPECT_EQ(whole_indices(Ints{2, 4}, {{Axis::tp, S(1)}}, mesh, 1), (Ints{2, 3, 6, 7}));
  EXPECT_EQ(whole_indices(Ints{3, 2}, {{Axis::tp, S(0)}}, mesh, 0), (Ints{0, 1, 2, 3}));
  EXPECT_EQ(local_shape(Ints{3, 2}, {{Axis::tp, S(0)}}, mesh, 1), (Ints{1, 2}));
  EXPECT_EQ(whole_indices(Ints{6}, {{Axis::tp, S(0, uneven_map())}}, mesh, 1), (Ints{2, 3, 4, 5}));
  EXPECT_EQ(whole_indices(Ints{}, {{Axis::tp, R()}}, mesh, 1), (Ints{0}));
  EXPECT_COMPLAINT(local_shape(Ints{3, 2}, {{Axis::tp, S(2)}}, mesh, 0), "dim 2 on axis tp");
}

// The judge reads indices in the map's own order, which need not be increasing.
TEST(Sharding, MapsMayPermute) {
  const IndexMap dealt = {"dealt", [](int64_t extent, int ranks, int r) {
                            Ints own;
                            for (int64_t i = r; i < extent; i += ranks) own.insert(own.begin(), i);
                            return own;
                          }};
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 2}});
  EXPECT_EQ(whole_indices(Ints{5, 2}, {{Axis::tp, S(0, dealt)}, {Axis::cp, R()}}, mesh, 2),
            (Ints{8, 9, 4, 5, 0, 1}));
  // cp keeps 4 5 6 7 of 8 on its second place; of these tp's second place owns 1 and 3, backwards.
  EXPECT_EQ(whole_indices(Ints{8}, {{Axis::cp, S(0)}, {Axis::tp, S(0, dealt)}}, mesh, 3),
            (Ints{7, 5}));
}

TEST(Sharding, PartialAndVaryingStack) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::dp, 3}});  // rank = t + 2d; dp is outermost
  const Layout layout = {{Axis::tp, P()}};          // dp not named: varying
  EXPECT_EQ(whole_shape(Ints{4, 5}, layout, mesh), (Ints{3, 2, 4, 5}));
  EXPECT_EQ(denoted_shape(Ints{4, 5}, layout, mesh), (Ints{3, 4, 5}));
  EXPECT_EQ(stacked_axes(layout, mesh, false), (std::vector<Axis>{Axis::dp, Axis::tp}));
  EXPECT_EQ(stacked_axes(layout, mesh, true), (std::vector<Axis>{Axis::dp}));
  // Rank 5 is t = 1, d = 2: the last place of 3 x 2, the last of 3 once tp is summed away.
  EXPECT_EQ(whole_indices(Ints{4, 5}, layout, mesh, 5).front(), 5 * 20);
  EXPECT_EQ(denoted_indices(Ints{4, 5}, layout, mesh, 5).front(), 2 * 20);
  EXPECT_EQ(denoted_indices(Ints{4, 5}, layout, mesh, 5).back(), 2 * 20 + 19);
  EXPECT_EQ(local_shape(Ints{4, 5}, layout, mesh, 5), (Ints{4, 5}));
  // An axis of size 1 stacks nothing.
  EXPECT_EQ(whole_shape(Ints{4}, {{Axis::tp, P()}}, Mesh({{Axis::tp, 1}})), (Ints{4}));
}

// Every element of the whole is held by as many ranks as have copies of it: once on S, P and V
// axes, by all ranks of an I or R axis.
TEST(Sharding, RanksCoverTheWhole) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 3}, {Axis::dp, 2}});
  const Ints shape = {7, 6};
  const std::vector<Placement> choices = {I(), R(), P(), V(), S(0), S(1), S(0, uneven_map())};
  for (const Placement& tp : choices) {
    for (const Placement& cp : choices) {
      for (const Placement& dp : choices) {
        const Layout layout = {{Axis::dp, dp}, {Axis::cp, cp}, {Axis::tp, tp}};
        int64_t copies = 1;
        for (Axis axis : {Axis::tp, Axis::cp, Axis::dp}) {
          const auto kind = placement_on(layout, axis).kind;
          if (kind == Placement::invariant || kind == Placement::replicate)
            copies *= mesh.size(axis);
        }
        Ints held(size_t(product(whole_shape(shape, layout, mesh))), 0);
        for (int rank = 0; rank < mesh.world(); ++rank) {
          const Ints own = whole_indices(shape, layout, mesh, rank);
          ASSERT_EQ(int64_t(own.size()), product(local_shape(shape, layout, mesh, rank)));
          ASSERT_EQ(denoted_indices(shape, layout, mesh, rank).size(), own.size());
          const Places places(Places::Of::whole, shape, layout, mesh, rank);
          ASSERT_EQ(places.size(), own.size());
          Ints piece, joined;
          for (size_t first = 0; first < own.size(); first += 5) {
            places.read(first, std::min<size_t>(5, own.size() - first), piece);
            joined.insert(joined.end(), piece.begin(), piece.end());
          }
          ASSERT_EQ(joined, own);
          for (int64_t i : own) ++held.at(size_t(i));
        }
        EXPECT_EQ(held, Ints(held.size(), copies)) << text(layout);
      }
    }
  }
}

TEST(Sharding, DenotedIndicesForgetTheStackOfPartialAxes) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 2}});
  const Layout sum = {{Axis::tp, P()}, {Axis::cp, S(0)}};
  for (int rank = 0; rank < 4; ++rank) {
    const Ints own = denoted_indices(Ints{4}, sum, mesh, rank);
    EXPECT_EQ(own, rank < 2 ? (Ints{0, 1}) : (Ints{2, 3}));
    const Layout plain = {{Axis::tp, R()}, {Axis::cp, V()}};
    EXPECT_EQ(whole_indices(Ints{4}, plain, mesh, rank),
              denoted_indices(Ints{4}, plain, mesh, rank));
  }
}

TEST(Sharding, ShardsDrawTheSameTensorUnderEveryLayout) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 2}});
  const Ints shape = {6, 4};
  const Draw d = {.fill = Fill::normal, .seed = 21};
  const Values whole = draw_whole(d, "x", DType::f32, shape);
  for (const Layout& layout :
       {Layout{{Axis::tp, S(0)}, {Axis::cp, S(1)}}, {{Axis::tp, R()}, {Axis::cp, S(0)}}}) {
    for (int rank = 0; rank < 4; ++rank) {
      for (int64_t i : whole_indices(shape, layout, mesh, rank)) {
        EXPECT_EQ(draw(d, "x", DType::f32, whole_shape(shape, layout, mesh), i), whole[size_t(i)]);
      }
    }
  }
}

TEST(Sharding, ElementsAreNamedInGlobalCoordinates) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::dp, 3}});
  const Layout layout = {{Axis::tp, P()}};
  EXPECT_EQ(index_text("x", 2 * 20 + 16, Ints{4, 5}, layout, mesh, true), "x[dp=2][3,1]");
  EXPECT_EQ(index_text("x", 5 * 20 + 16, Ints{4, 5}, layout, mesh, false), "x[dp=2,tp=1][3,1]");
  EXPECT_EQ(index_text("b", 6, Ints{7}, {{Axis::tp, R()}, {Axis::dp, I()}}, mesh, true), "b[6]");
  EXPECT_EQ(index_text("loss", 0, Ints{}, {{Axis::tp, R()}, {Axis::dp, I()}}, mesh, true), "loss");
  EXPECT_COMPLAINT(index_text("b", 7, Ints{7}, {}, Mesh(), true), "b[7]");
}

// Both ends of an axis hold a copy, and nobody between.
TEST(Sharding, ATensorMayHaveCopiesOnSomeRanks) {
  const Placement ends = I(ends_map());
  EXPECT_EQ(extents_of(ends_map(), 5, 4), (Ints{5, 0, 0, 5}));
  EXPECT_EQ(extents_of(ends_map(), 5, 1), Ints{5});
  EXPECT_EQ(extents_of(on_rank_map(1), 5, 3), (Ints{0, 5, 0}));
  EXPECT_EQ(ends_map().owned(3, 4, 3), (Ints{0, 1, 2}));
  EXPECT_EQ(letter(dual(ends)), 'I');
  EXPECT_EQ(dual(ends).map, &ends_map());
  EXPECT_EQ(text({{Axis::pp, ends}, {Axis::dp, I()}}), "pp:I(ends) dp:I");

  EXPECT_EQ(copies(ends, 4), 2);
  EXPECT_EQ(copies(ends, 1), 1);
  EXPECT_EQ(copies(I(), 4), 4);
  EXPECT_EQ(place_of_copy(ends, 4, 3), 1);
  EXPECT_EQ(place_of_copy(ends, 4, 2), -1);
  EXPECT_EQ(place_of_copy(I(), 4, 2), 2);

  const Mesh mesh({{Axis::pp, 4}, {Axis::dp, 2}});
  const Layout layout{{Axis::dp, I()}, {Axis::pp, ends}};
  EXPECT_EQ(pairing_weight(layout, mesh), 0.25);
  EXPECT_EQ(local_shape(Ints{5, 3}, layout, mesh, 7), (Ints{5, 3}));
  EXPECT_EQ(local_shape(Ints{5, 3}, layout, mesh, 3), (Ints{0, 3}));
  EXPECT_EQ(mesh.holders(layout, {Axis::pp}), (std::vector<std::vector<int>>{{0, 6}, {1, 7}}));
  EXPECT_EQ(mesh.holders(layout, {Axis::dp, Axis::pp}),
            (std::vector<std::vector<int>>{{0, 1, 6, 7}}));
}

// <x, y> of an invariant tensor is one copy's: the mean over the axis of what the ranks compute.
TEST(Sharding, PairingCountsEachLogicalCopyOnce) {
  const Mesh mesh({{Axis::tp, 4}, {Axis::cp, 2}});
  EXPECT_EQ(pairing_weight({{Axis::tp, S(0)}, {Axis::cp, I()}}, mesh), 0.5);
  EXPECT_EQ(pairing_weight({{Axis::tp, I()}, {Axis::cp, I()}}, mesh), 0.125);
  EXPECT_EQ(pairing_weight({{Axis::tp, R()}, {Axis::cp, P()}}, mesh), 1);
  EXPECT_EQ(pairing_weight({}, mesh), 1);
  EXPECT_EQ(pairing_weight({{Axis::ep, I()}}, mesh), 1);
}

// ---- Stored regressions

std::vector<Regression> regressions_in(const std::string& text) {
  std::istringstream in(text);
  return read_regressions(in, "stored.txt");
}

TEST(Regressions, LinesWithTheirOrigin) {
  const auto entries = regressions_in(
      "# comment\n\nlinear_row tp=4 seed=7 # bias summed twice # seen at p = 4\r\n  b tp=2  # o\n");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].number, 3);
  EXPECT_EQ(entries[0].line, "linear_row tp=4 seed=7");
  EXPECT_EQ(entries[0].origin, "bias summed twice # seen at p = 4");
  EXPECT_EQ(entries[1].number, 4);
  EXPECT_EQ(entries[1].line, "b tp=2");
  EXPECT_EQ(entries[1].origin, "o");
}

TEST(Regressions, RefusedWithTheirLineNumber) {
  EXPECT_COMPLAINT(regressions_in("# c\nlinear_row tp=4\n"), "stored.txt:2");
  EXPECT_COMPLAINT(regressions_in("linear_row tp=4 # \n"), "stored.txt:1");
  EXPECT_COMPLAINT(regressions_in("a tp=2 # x\n\na tp=2 # y\n"), "stored.txt:3");
  EXPECT_COMPLAINT(read_regressions("/nowhere/regressions.txt"), "/nowhere/regressions.txt");
}

TEST(Regressions, TheStoredFileIsReadable) {
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  for (const auto& entry : read_regressions((root / "fixtures/regressions.txt").string())) {
    EXPECT_FALSE(entry.origin.empty()) << entry.number;
  }
}

}  // namespace fixtures_test
}  // namespace
}  // namespace shardproof
