/* Layout-invariant fingerprints of tensors, for a training loop in any language that calls C.
 *
 *   digest(T) = sum over elements of mix(s, i, b) mod 2^64, in two lanes of different salt
 *   mix(s, i, b) = fmix(fmix(s + (i + 1) 0x9E3779B97F4A7C15) xor b)
 *
 * i is the row-major index of the element in the whole, unsharded tensor, b its bits. A sum does
 * not care who adds: the digests of the shards of any layout add up to that of the whole, so that
 * a run on 8 ranks can be compared with one on 1, and nothing but 16 bytes crosses between them.
 * For a fixed index mix is a bijection of the bits: a change of exactly one element is always
 * seen, any other change but for a chance of 2^-128.
 *
 *   shardproof_hash h = shardproof_hash_named("norm1.gamma", SHARDPROOF_F32, SHARDPROOF_RAW);
 *   shardproof_digest d = {0};
 *   int64_t shape[1] = {1024}, start[1] = {0}, extent[1] = {1024};
 *   shardproof_digest_block(&d, &h, gamma, 1, shape, start, extent);
 *   shardproof_digest_write(log, step, "backward", "norm1.gamma", "tp:I", "3", &h, &d);
 *
 * `shardproof drift --logs A` then compares the replicas of one run, `--logs A B` two runs.
 * Write the parts of one tensor that lie apart (a fused [gate; up] weight) by one block each.
 *
 * RAW keeps the bits as they are: replicas, recomputation, determinism. CANON makes -0 a +0 and
 * every NaN one NaN: layouts and devices that differ in these alone agree. Values that are partial
 * sums have no digest before they are reduced.
 *
 * C11, no dependency, no state, no allocation. */
#ifndef SHARDPROOF_DIGEST_H
#define SHARDPROOF_DIGEST_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  SHARDPROOF_F64,
  SHARDPROOF_F32,
  SHARDPROOF_BF16,
  SHARDPROOF_F16,
  SHARDPROOF_I64,
  SHARDPROOF_I32
} shardproof_dtype;
typedef enum { SHARDPROOF_RAW, SHARDPROOF_CANON } shardproof_mode;
/* The unit that is mixed: an element, or the aligned 64-bit words of the fastest dim (2 f32, 4
 * half values), which are read at once. Digests of different units do not compare. */
typedef enum { SHARDPROOF_ELEMENT, SHARDPROOF_WORD } shardproof_unit;

typedef struct {
  uint64_t lane[2];
  uint64_t coverage[2]; /* the same sum with b = 0: which indices were added, whatever they hold */
  uint64_t elements, nans, infinities, negative_zeros;
} shardproof_digest;

typedef struct {
  uint64_t salt[2];
  shardproof_dtype dtype;
  shardproof_mode mode;
  shardproof_unit unit;
} shardproof_hash;

static inline uint64_t shardproof_fmix(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

static inline uint64_t shardproof_mix(uint64_t salt, uint64_t index, uint64_t bits) {
  return shardproof_fmix(shardproof_fmix(salt + (index + 1) * UINT64_C(0x9E3779B97F4A7C15)) ^ bits);
}

static inline size_t shardproof_size(shardproof_dtype dtype) {
  static const size_t sizes[] = {8, 4, 2, 2, 8, 4};
  return sizes[dtype];
}

static inline const char* shardproof_dtype_name(shardproof_dtype dtype) {
  static const char* const names[] = {"f64", "f32", "bf16", "f16", "i64", "i32"};
  return names[dtype];
}

/* Without a name: the plain lanes. */
static inline shardproof_hash shardproof_hash_plain(shardproof_dtype dtype, shardproof_mode mode) {
  shardproof_hash h;
  h.salt[0] = UINT64_C(0x243F6A8885A308D3); /* fraction of pi */
  h.salt[1] = UINT64_C(0x13198A2E03707344);
  h.dtype = dtype;
  h.mode = mode;
  h.unit = SHARDPROOF_ELEMENT;
  return h;
}

/* Salted by name and dtype (64-bit FNV-1a of "name:dtype"), so that equal contents of two tensors
 * do not look alike. */
static inline shardproof_hash shardproof_hash_named(const char* name, shardproof_dtype dtype,
                                                    shardproof_mode mode) {
  shardproof_hash h = shardproof_hash_plain(dtype, mode);
  uint64_t fnv = UINT64_C(0xCBF29CE484222325), salt;
  const char* parts[3];
  int i;
  parts[0] = name;
  parts[1] = ":";
  parts[2] = shardproof_dtype_name(dtype);
  for (i = 0; i < 3; ++i) {
    const char* c;
    for (c = parts[i]; *c; ++c) fnv = (fnv ^ (uint8_t)*c) * UINT64_C(0x100000001B3);
  }
  salt = shardproof_fmix(fnv);
  h.salt[0] ^= salt;
  h.salt[1] ^= salt;
  return h;
}

/* What the bits of a floating value are: layout of its sign, exponent and fraction. */
static inline void shardproof_classify(shardproof_dtype dtype, uint64_t bits, int* nan, int* inf,
                                       int* negative_zero) {
  static const int fraction[] = {52, 23, 7, 10}, width[] = {64, 32, 16, 16};
  uint64_t sign, magnitude, infinity;
  *nan = *inf = *negative_zero = 0;
  if (dtype > SHARDPROOF_F16) return;
  sign = UINT64_C(1) << (width[dtype] - 1);
  magnitude = bits & (sign - 1);
  infinity = (sign - 1) & ~((UINT64_C(1) << fraction[dtype]) - 1);
  *nan = magnitude > infinity;
  *inf = magnitude == infinity;
  *negative_zero = bits == sign;
}

/* The value bits, counted and in the mode's form. The NaN of CANON is quiet and positive. */
static inline uint64_t shardproof_bits(shardproof_digest* d, const shardproof_hash* h,
                                       const unsigned char* element) {
  uint64_t bits = 0;
  int nan, inf, negative_zero;
  if (shardproof_size(h->dtype) == 8) {
    memcpy(&bits, element, 8);
  } else if (shardproof_size(h->dtype) == 4) {
    uint32_t b;
    memcpy(&b, element, 4);
    bits = b;
  } else {
    uint16_t b;
    memcpy(&b, element, 2);
    bits = b;
  }
  shardproof_classify(h->dtype, bits, &nan, &inf, &negative_zero);
  d->elements += 1;
  d->nans += (uint64_t)nan;
  d->infinities += (uint64_t)inf;
  d->negative_zeros += (uint64_t)negative_zero;
  if (h->mode == SHARDPROOF_CANON) {
    static const uint64_t quiet[] = {UINT64_C(0x7FF8000000000000), 0x7FC00000, 0x7FC0, 0x7E00};
    if (nan) bits = quiet[h->dtype];
    if (negative_zero) bits = 0;
  }
  return bits;
}

static inline void shardproof_digest_unit(shardproof_digest* d, const shardproof_hash* h,
                                          uint64_t index, uint64_t bits) {
  int lane;
  for (lane = 0; lane < 2; ++lane) {
    d->lane[lane] += shardproof_mix(h->salt[lane], index, bits);
    d->coverage[lane] += shardproof_mix(h->salt[lane], index, 0);
  }
}

/* One element at its index in the whole tensor (unit element only). */
static inline void shardproof_digest_element(shardproof_digest* d, const shardproof_hash* h,
                                             const void* element, uint64_t index) {
  shardproof_digest_unit(d, h, index, shardproof_bits(d, h, (const unsigned char*)element));
}

/* `count` elements that follow one another in memory and in the whole tensor, the first at `first`.
 * Returns 0; -1, and adds nothing, where unit word is asked for and the run is not one of words. */
static inline int shardproof_digest_run(shardproof_digest* d, const shardproof_hash* h,
                                        const void* data, uint64_t count, uint64_t first) {
  const unsigned char* p = (const unsigned char*)data;
  const size_t size = shardproof_size(h->dtype);
  const uint64_t of_unit = h->unit == SHARDPROOF_WORD ? 8 / size : 1;
  uint64_t i, j;
  if (first % of_unit || count % of_unit) return -1;
  for (i = 0; i < count; i += of_unit) {
    uint64_t bits = 0; /* first element in the low bits */
    for (j = 0; j < of_unit; ++j, p += size)
      bits |= shardproof_bits(d, h, p) << (j * 8 * size % 64);
    shardproof_digest_unit(d, h, (first + i) / of_unit, bits);
  }
  return 0;
}

/* A contiguous local tensor that is the block start[k] .. start[k] + extent[k] of each dim k of a
 * whole tensor of `shape`. Returns 0; -1, and adds nothing, where the block does not lie within the
 * shape, has more than 16 dims or, with unit word, its rows are not of words. */
static inline int shardproof_digest_block(shardproof_digest* d, const shardproof_hash* h,
                                          const void* data, int dims, const int64_t* shape,
                                          const int64_t* start, const int64_t* extent) {
  const unsigned char* p = (const unsigned char*)data;
  const int64_t of_unit =
      h->unit == SHARDPROOF_WORD ? (int64_t)(8 / shardproof_size(h->dtype)) : 1;
  int64_t at[16] = {0}, row, rows = 1;
  int k;
  if (dims < 0 || dims > 16) return -1;
  for (k = 0; k < dims; ++k)
    if (start[k] < 0 || extent[k] < 0 || extent[k] > shape[k] - start[k]) return -1;
  if (dims == 0) return shardproof_digest_run(d, h, data, 1, 0);
  if (shape[dims - 1] % of_unit || start[dims - 1] % of_unit || extent[dims - 1] % of_unit)
    return -1;
  for (k = 0; k + 1 < dims; ++k) rows *= extent[k];
  for (row = 0; row < rows; ++row) {
    uint64_t index = 0;
    for (k = 0; k < dims; ++k)
      index = index * (uint64_t)shape[k] + (uint64_t)(start[k] + (k + 1 < dims ? at[k] : 0));
    shardproof_digest_run(d, h, p, (uint64_t)extent[dims - 1], index);
    p += (size_t)extent[dims - 1] * shardproof_size(h->dtype);
    for (k = dims - 2; k >= 0 && ++at[k] == extent[k]; --k) at[k] = 0;
  }
  return 0;
}

static inline void shardproof_digest_add(shardproof_digest* sum, const shardproof_digest* more) {
  int lane;
  for (lane = 0; lane < 2; ++lane) {
    sum->lane[lane] += more->lane[lane];
    sum->coverage[lane] += more->coverage[lane];
  }
  sum->elements += more->elements;
  sum->nans += more->nans;
  sum->infinities += more->infinities;
  sum->negative_zeros += more->negative_zeros;
}

/* One line of a log. `axis` says how the tensor lives on the axes of the mesh, "tp:S,dp:I" (S: a
 * shard, digests add up; I: a copy, digests agree), `rank` the coordinates on them in that order,
 * "3,0". `tensor` and `phase` are words without blanks. Returns 0, or -1 where writing failed. */
static inline int shardproof_digest_write(FILE* log, int64_t step, const char* phase,
                                          const char* tensor, const char* axis, const char* rank,
                                          const shardproof_hash* h, const shardproof_digest* d) {
  const int n = fprintf(
      log,
      "step=%" PRId64 " phase=%s tensor=%s axis=%s rank=%s digest=%016" PRIx64 "%016" PRIx64
      " coverage=%016" PRIx64 "%016" PRIx64 " elements=%" PRIu64 " nan=%" PRIu64 " inf=%" PRIu64
      " negzero=%" PRIu64 " dtype=%s mode=%s unit=%s\n",
      step, phase, tensor, axis, rank, d->lane[0], d->lane[1], d->coverage[0], d->coverage[1],
      d->elements, d->nans, d->infinities, d->negative_zeros, shardproof_dtype_name(h->dtype),
      h->mode == SHARDPROOF_CANON ? "canon" : "raw",
      h->unit == SHARDPROOF_WORD ? "word" : "element");
  return n < 0 || fflush(log) != 0 ? -1 : 0;
}

#ifdef __cplusplus
}
#endif
#endif
