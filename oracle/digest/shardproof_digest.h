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
 * Runs and blocks are mixed 8 units at a time where the processor has AVX-512, 4 where it has AVX2,
 * asked at run time; every form gives the same bits. SHARDPROOF_DIGEST_PORTABLE leaves these out.
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

/* What a kernel of a device calls, too (oracle/digest/units.hpp). */
#ifdef __CUDACC__
#define SHARDPROOF_BOTH __host__ __device__ static inline
#else
#define SHARDPROOF_BOTH static inline
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

#define SHARDPROOF_GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define SHARDPROOF_FMIX(z)                              \
  do {                                                  \
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9); \
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB); \
    z = z ^ (z >> 31);                                  \
  } while (0)

SHARDPROOF_BOTH uint64_t shardproof_fmix(uint64_t z) {
  SHARDPROOF_FMIX(z);
  return z;
}

SHARDPROOF_BOTH uint64_t shardproof_mix(uint64_t salt, uint64_t index, uint64_t bits) {
  return shardproof_fmix(shardproof_fmix(salt + (index + 1) * SHARDPROOF_GOLDEN) ^ bits);
}

SHARDPROOF_BOTH size_t shardproof_size(shardproof_dtype dtype) {
  if (dtype == SHARDPROOF_F64 || dtype == SHARDPROOF_I64) return 8;
  return dtype == SHARDPROOF_F32 || dtype == SHARDPROOF_I32 ? 4 : 2;
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

/* Bits of a floating element: its sign and exponent, and the lowest bit of that. Integers: none. */
typedef struct {
  uint64_t sign, exponent, step;
} shardproof_format;

SHARDPROOF_BOTH shardproof_format shardproof_format_of(shardproof_dtype dtype) {
  shardproof_format f = {0, 0, 0};
  int fraction;
  if (dtype > SHARDPROOF_F16) return f;
  fraction = dtype == SHARDPROOF_F64 ? 52 : dtype == SHARDPROOF_F32 ? 23 : dtype == SHARDPROOF_BF16 ? 7 : 10;
  f.sign = UINT64_C(1) << (8 * shardproof_size(dtype) - 1);
  f.step = UINT64_C(1) << fraction;
  f.exponent = f.sign - f.step;
  return f;
}

/* The bits of one element, counted and in the mode's form. The NaN of CANON is quiet and positive.
 */
SHARDPROOF_BOTH uint64_t shardproof_counted(shardproof_digest* d, const shardproof_hash* h,
                                          uint64_t bits) {
  const shardproof_format f = shardproof_format_of(h->dtype);
  const uint64_t magnitude = bits & (f.sign - 1);
  const int floating = f.sign != 0, nan = floating && magnitude > f.exponent;
  const int negative_zero = floating && bits == f.sign;
  d->elements += 1;
  d->nans += (uint64_t)nan;
  d->infinities += (uint64_t)(floating && magnitude == f.exponent);
  d->negative_zeros += (uint64_t)negative_zero;
  if (h->mode == SHARDPROOF_CANON && nan) return f.exponent | (f.step >> 1);
  return h->mode == SHARDPROOF_CANON && negative_zero ? 0 : bits;
}

SHARDPROOF_BOTH uint64_t shardproof_load(const void* element, size_t size) {
#ifdef __CUDA_ARCH__ /* where elements lie at multiples of their size, a word at one of 8 */
  if (size == 8) return *(const uint64_t*)element;
  return size == 4 ? *(const uint32_t*)element : *(const uint16_t*)element;
#else
  uint64_t eight;
  uint32_t four;
  uint16_t two;
  if (size == 8) return memcpy(&eight, element, 8), eight;
  if (size == 4) return memcpy(&four, element, 4), four;
  return memcpy(&two, element, 2), two;
#endif
}

SHARDPROOF_BOTH void shardproof_digest_unit(shardproof_digest* d, const shardproof_hash* h,
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
  const uint64_t bits = shardproof_load(element, shardproof_size(h->dtype));
  shardproof_digest_unit(d, h, index, shardproof_counted(d, h, bits));
}

/* ---- Many units that follow one another, 8 bytes each
 *
 * Two fmix a unit and lane for the digest and one more for the coverage: that of the index serves
 * both. Elements are told apart within a unit without leaving it: an exponent of all ones carries
 * into the sign when 1 is added to it, and of b xor -0 the magnitude carries into the sign with all
 * ones added, unless it is 0. The vector forms are the portable one with 4 or 8 units side by side;
 * sums do not care. */

typedef struct {
  uint64_t salt[2];
  uint64_t sign, exponent, step; /* of every element of a unit; 0: count nothing */
  int to_low;                    /* from the sign of an element to its lowest bit */
} shardproof_lens;

/* What a chunk adds. Counts are kept a field an element, so that a chunk holds 2^16 units at most.
 */
typedef struct {
  uint64_t lane[2], coverage[2], not_finite, negative_zeros;
} shardproof_sums;

SHARDPROOF_BOTH shardproof_lens shardproof_lens_of(const shardproof_hash* h) {
  const shardproof_format f = shardproof_format_of(h->dtype);
  const uint64_t width = 8 * shardproof_size(h->dtype);
  const uint64_t elements = h->unit == SHARDPROOF_WORD ? 64 / width : 1;
  shardproof_lens l = {{0, 0}, 0, 0, 0, (int)width - 1};
  uint64_t k;
  l.salt[0] = h->salt[0];
  l.salt[1] = h->salt[1];
  for (k = 0; h->mode == SHARDPROOF_RAW && k < elements; ++k) {
    l.sign |= f.sign << (k * width % 64);
    l.exponent |= f.exponent << (k * width % 64);
    l.step |= f.step << (k * width % 64);
  }
  return l;
}

/* A scalar or a vector of units: their marks in the lowest bit of each element. */
#define SHARDPROOF_NOT_FINITE(l, bits) \
  (((((bits) & (l)->exponent) + (l)->step) & (l)->sign) >> (l)->to_low)
#define SHARDPROOF_NEGATIVE_ZERO(l, bits) \
  ((~((((bits) & ~(l)->sign) + ~(l)->sign) | ((bits) ^ (l)->sign)) & (l)->sign) >> (l)->to_low)

static inline void shardproof_units_portable(shardproof_sums* s, const shardproof_lens* l,
                                             const unsigned char* units, uint64_t n,
                                             uint64_t first) {
  uint64_t i;
  int lane;
  for (lane = 0; lane < 2; ++lane)
    for (i = 0; i < n; ++i) {
      const uint64_t index = shardproof_fmix(l->salt[lane] + (first + i + 1) * SHARDPROOF_GOLDEN);
      s->lane[lane] += shardproof_fmix(index ^ shardproof_load(units + 8 * i, 8));
      s->coverage[lane] += shardproof_fmix(index);
    }
  for (i = 0; i < n; ++i) {
    const uint64_t bits = shardproof_load(units + 8 * i, 8);
    s->not_finite += SHARDPROOF_NOT_FINITE(l, bits);
    s->negative_zeros += SHARDPROOF_NEGATIVE_ZERO(l, bits);
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__) && \
    !defined(SHARDPROOF_DIGEST_PORTABLE)
#define SHARDPROOF_DIGEST_VECTORS 1

/* The lanes by hand: a loop over them would keep them in memory at -O2. */
#define SHARDPROOF_LANE(NAME, WIDTH, K) \
  do {                                  \
    NAME##_vector index = at##K, value; \
    SHARDPROOF_FMIX(index);             \
    value = index ^ bits;               \
    SHARDPROOF_FMIX(value);             \
    SHARDPROOF_FMIX(index);             \
    values##K += value;                 \
    indices##K += index;                \
    at##K += WIDTH * SHARDPROOF_GOLDEN; \
  } while (0)

#define SHARDPROOF_UNITS(NAME, TARGET, WIDTH)                                               \
  typedef uint64_t NAME##_vector __attribute__((vector_size(8 * WIDTH)));                   \
  __attribute__((target(TARGET))) static inline void NAME(                                  \
      shardproof_sums* s, const shardproof_lens* l, const unsigned char* units, uint64_t n, \
      uint64_t first) {                                                                     \
    const NAME##_vector none = {0};                                                         \
    NAME##_vector at0 = none, at1 = none, values0 = none, values1 = none, indices0 = none,  \
                  indices1 = none, not_finite = none, negative_zeros = none, bits;          \
    uint64_t i;                                                                             \
    int k;                                                                                  \
    for (k = 0; k < WIDTH; ++k) {                                                           \
      at0[k] = l->salt[0] + (first + (uint64_t)k + 1) * SHARDPROOF_GOLDEN;                  \
      at1[k] = l->salt[1] + (first + (uint64_t)k + 1) * SHARDPROOF_GOLDEN;                  \
    }                                                                                       \
    for (i = 0; i + WIDTH <= n; i += WIDTH) {                                               \
      memcpy(&bits, units + 8 * i, sizeof bits);                                            \
      not_finite += SHARDPROOF_NOT_FINITE(l, bits);                                         \
      negative_zeros += SHARDPROOF_NEGATIVE_ZERO(l, bits);                                  \
      SHARDPROOF_LANE(NAME, WIDTH, 0);                                                      \
      SHARDPROOF_LANE(NAME, WIDTH, 1);                                                      \
    }                                                                                       \
    for (k = 0; k < WIDTH; ++k) {                                                           \
      s->lane[0] += values0[k];                                                             \
      s->lane[1] += values1[k];                                                             \
      s->coverage[0] += indices0[k];                                                        \
      s->coverage[1] += indices1[k];                                                        \
      s->not_finite += not_finite[k];                                                       \
      s->negative_zeros += negative_zeros[k];                                               \
    }                                                                                       \
    shardproof_units_portable(s, l, units + 8 * i, n - i, first + i);                       \
  }
SHARDPROOF_UNITS(shardproof_units_avx2, "avx2", 4)
SHARDPROOF_UNITS(shardproof_units_avx512, "avx512f,avx512dq", 8)
#undef SHARDPROOF_UNITS
#undef SHARDPROOF_LANE
#endif

/* The form that runs on this processor: "avx512", "avx2" or "portable". */
static inline const char* shardproof_digest_form(void) {
#ifdef SHARDPROOF_DIGEST_VECTORS
  if (__builtin_cpu_supports("avx512dq")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
  return "portable";
}

static inline void shardproof_units(shardproof_sums* s, const shardproof_lens* l,
                                    const unsigned char* units, uint64_t n, uint64_t first) {
#ifdef SHARDPROOF_DIGEST_VECTORS
  const char* form = shardproof_digest_form();
  if (form[0] == 'a' && form[3] == '5') {
    shardproof_units_avx512(s, l, units, n, first);
    return;
  }
  if (form[0] == 'a') {
    shardproof_units_avx2(s, l, units, n, first);
    return;
  }
#endif
  shardproof_units_portable(s, l, units, n, first);
}

static inline uint64_t shardproof_fields(uint64_t fields, uint64_t width) {
  uint64_t sum = 0;
  for (; width < 64 && fields; fields >>= width) sum += fields & ((UINT64_C(1) << width) - 1);
  return width < 64 ? sum : fields;
}

#define SHARDPROOF_CHUNK 512 /* units: 4 KB, which stays in the first cache */

/* A chunk of units: as they lie in memory where these are words, else element by element. */
static inline void shardproof_digest_chunk(shardproof_digest* d, const shardproof_hash* h,
                                           const shardproof_lens* l, const unsigned char* p,
                                           uint64_t units, uint64_t first) {
  const size_t size = shardproof_size(h->dtype);
  const uint64_t of_unit = h->unit == SHARDPROOF_WORD ? 8 / size : 1, width = 8 * size;
  const uint16_t one = 1;
  const int little_end = *(const unsigned char*)&one == 1;
  uint64_t gathered[SHARDPROOF_CHUNK], i, j;
  shardproof_sums s = {{0, 0}, {0, 0}, 0, 0};
  const int in_place = h->mode == SHARDPROOF_RAW && (size == 8 || (of_unit > 1 && little_end));
  for (i = 0; !in_place && i < units; ++i) {
    gathered[i] = 0; /* first element in the low bits */
    for (j = 0; j < of_unit; ++j) {
      uint64_t bits = shardproof_load(p + (i * of_unit + j) * size, size);
      if (h->mode == SHARDPROOF_CANON) bits = shardproof_counted(d, h, bits);
      gathered[i] |= bits << (j * width % 64);
    }
  }
  shardproof_units(&s, l, in_place ? p : (const unsigned char*)gathered, units, first);
  for (i = 0; i < 2; ++i) {
    d->lane[i] += s.lane[i];
    d->coverage[i] += s.coverage[i];
  }
  if (h->mode == SHARDPROOF_CANON) return; /* counted above */
  d->elements += units * of_unit;
  d->negative_zeros += shardproof_fields(s.negative_zeros, width);
  if (s.not_finite == 0) return;
  for (i = 0; i < units * of_unit; ++i) {
    const shardproof_format f = shardproof_format_of(h->dtype);
    const uint64_t magnitude = shardproof_load(p + i * size, size) & (f.sign - 1);
    d->nans += magnitude > f.exponent;
    d->infinities += magnitude == f.exponent;
  }
}

/* `count` elements that follow one another in memory and in the whole tensor, the first at `first`.
 * Returns 0; -1, and adds nothing, where unit word is asked for and the run is not one of words. */
static inline int shardproof_digest_run(shardproof_digest* d, const shardproof_hash* h,
                                        const void* data, uint64_t count, uint64_t first) {
  const unsigned char* p = (const unsigned char*)data;
  const uint64_t of_unit = h->unit == SHARDPROOF_WORD ? 8 / shardproof_size(h->dtype) : 1;
  const shardproof_lens l = shardproof_lens_of(h);
  uint64_t at, units, n;
  if (first % of_unit || count % of_unit) return -1;
  units = count / of_unit;
  for (at = 0; at < units; at += n) {
    n = units - at < SHARDPROOF_CHUNK ? units - at : SHARDPROOF_CHUNK;
    shardproof_digest_chunk(d, h, &l, p + at * of_unit * shardproof_size(h->dtype), n,
                            first / of_unit + at);
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
  const int64_t of_unit = h->unit == SHARDPROOF_WORD ? (int64_t)(8 / shardproof_size(h->dtype)) : 1;
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

/* One line of a log. `axis` says how the tensor lives on the axes of the mesh and how many ranks
 * these have, "tp:S4,dp:I2" (S: a shard, digests add up; I: a copy, digests agree; D: numbers of its
 * own, digests differ), `rank` the coordinates on them in that order, "3,0". `tensor` and `phase`
 * are words without blanks. Returns 0, or -1 where writing failed. */
static inline int shardproof_digest_write(FILE* log, int64_t step, const char* phase,
                                          const char* tensor, const char* axis, const char* rank,
                                          const shardproof_hash* h, const shardproof_digest* d) {
  const int n =
      fprintf(log,
              "step=%" PRId64 " phase=%s tensor=%s axis=%s rank=%s digest=%016" PRIx64 "%016" PRIx64
              " coverage=%016" PRIx64 "%016" PRIx64 " elements=%" PRIu64 " nan=%" PRIu64
              " inf=%" PRIu64 " negzero=%" PRIu64 " dtype=%s mode=%s unit=%s\n",
              step, phase, tensor, axis, rank, d->lane[0], d->lane[1], d->coverage[0],
              d->coverage[1], d->elements, d->nans, d->infinities, d->negative_zeros,
              shardproof_dtype_name(h->dtype), h->mode == SHARDPROOF_CANON ? "canon" : "raw",
              h->unit == SHARDPROOF_WORD ? "word" : "element");
  return n < 0 || fflush(log) != 0 ? -1 : 0;
}

#ifdef __cplusplus
}
#endif
#endif
