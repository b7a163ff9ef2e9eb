// Loops over many elements, several at a time: four where the processor has AVX2, else two. What
// they give does not depend on how many.
#pragma once
#include <cstddef>

#include "fixtures/dtype.hpp"

namespace shardproof::wide {

// The value of each element, as load() gives it.
void load(const std::byte* elements, DType, size_t n, double* values);
// a[i] == b[i] for each i; NaN equals nothing.
bool equal(const double* a, const double* b, size_t n);

// Sums of at most so many products of whole numbers below 2^20 are whole numbers below 2^53, which
// doubles hold in any order. False where a factor is another number.
inline constexpr size_t few_products = size_t(1) << 12;
bool whole_products(const double* a, const double* b, size_t n, double& sum, double& magnitude);

}  // namespace shardproof::wide
