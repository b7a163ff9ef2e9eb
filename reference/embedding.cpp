#include "reference/embedding.hpp"

#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

void require_id(int64_t id, int64_t rows) {
  if (id < 0 || id >= rows)
    throw std::invalid_argument("reference embedding: expected an id below " +
                                std::to_string(rows) + ", met " + std::to_string(id));
}

}  // namespace

Values embedding(In w, std::span<const int64_t> ids, int64_t width) {
  Values y;
  for (int64_t id : ids) {
    require_id(id, int64_t(w.size()) / width);
    const In row = w.subspan(size_t(id * width), size_t(width));
    y.insert(y.end(), row.begin(), row.end());
  }
  return y;
}

Values embedding_backward(std::span<const int64_t> ids, int64_t rows, int64_t width, In g) {
  Values dw(static_cast<size_t>(rows * width));
  for (size_t t = 0; t < ids.size(); ++t) {
    require_id(ids[t], rows);
    for (int64_t j = 0; j < width; ++j)
      dw[size_t(ids[t] * width + j)] += g[t * size_t(width) + size_t(j)];
  }
  return dw;
}

}  // namespace shardproof::reference
