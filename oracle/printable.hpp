// Text from outside as it may be shown.
#pragma once
#include <string>

namespace shardproof::telling {

// Characters that would steer a terminal, and bytes that are no UTF-8, become '?'; newlines stay.
std::string printable(const std::string&);
// Text and attribute values of XML 1.0: escaped, and U+FFFD for what is not UTF-8 or not allowed.
std::string xml_text(const std::string&);

}  // namespace shardproof::telling
