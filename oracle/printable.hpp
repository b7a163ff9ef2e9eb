// Text from outside as it may be shown.
#pragma once
#include <string>
#include <string_view>

namespace shardproof::telling {

// Bytes of characters that would steer a terminal, and bytes that are no UTF-8, as \x1b; newlines
// stay.
std::string printable(const std::string&);
// A word that was met, for a message: printable, in quotes, and not a page long.
std::string in_quotes(std::string_view word, size_t most = 60);
// Text and attribute values of XML 1.0: escaped, and U+FFFD for what is not UTF-8 or not allowed.
std::string xml_text(const std::string&);

}  // namespace shardproof::telling
