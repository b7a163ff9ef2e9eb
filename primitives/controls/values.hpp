// What twins do to a tensor of the host in place.
#pragma once
#include <vector>

#include "fixtures/tensor.hpp"

namespace shardproof::controls {

// Element by element, in double.
template <class Each>
void change(const View& v, Each each) {
  std::vector<double> values = to_doubles(v);
  for (size_t i = 0; i < values.size(); ++i) values[i] = each(i, values[i]);
  fill_from(v, values);
}

}  // namespace shardproof::controls
