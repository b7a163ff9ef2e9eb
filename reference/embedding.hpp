// Rows of a table by id, and the gradient of the table.
//
//   y_t = W[id_t]      dW_v = sum over the tokens of id v of g_t
#pragma once
#include <cstdint>
#include <span>

#include "reference/linear.hpp"

namespace shardproof::reference {

Values embedding(In w, std::span<const int64_t> ids, int64_t width);
Values embedding_backward(std::span<const int64_t> ids, int64_t rows, int64_t width, In g);

}  // namespace shardproof::reference
