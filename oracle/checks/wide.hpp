// Loops over many elements, several at a time: eight where the processor has AVX-512, four where it
// has AVX2, else two. What they give does not depend on how many.
#pragma once
#include <cstddef>

#include "fixtures/dtype.hpp"

namespace shardproof::wide {

// The value of each element, as load() gives it.
void load(const std::byte* elements, DType, size_t n, double* values);
// a[i] == b[i] for each i; NaN equals nothing.
bool equal(const double* a, const double* b, size_t n);
bool equal(const std::byte* elements, DType, const double* b, size_t n);

// Sums of products of whole numbers, of which doubles hold every partial sum in any order: their
// magnitude is below 2^53. False where it is not, or a factor is another number. Of factors below
// 2^20 they may be so many.
inline constexpr size_t few_products = size_t(1) << 12;
bool whole_products(const double* a, const double* b, size_t n, double& sum, double& magnitude);
bool whole_products(const std::byte* elements, DType, const double* b, size_t n, double& sum,
                    double& magnitude);

}  // namespace shardproof::wide
