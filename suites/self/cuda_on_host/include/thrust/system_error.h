#pragma once
#include <system_error>

namespace thrust {
using system_error = std::system_error;
}
