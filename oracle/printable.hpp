// Text from outside as it may be shown.
#pragma once
#include <string>
#include <string_view>

namespace shardproof::telling {

// Bytes of characters that would steer a terminal, and bytes that are no UTF-8, as \x1b; newlines
// stay.
std::string printable(const std::string&);
// The same, newlines too.
std::string one_line(const std::string&);
// A word to paste into a shell that comes out as it was, in quotes where it must be; what is
// escaped is so in $'...'.
std::string shell_word(const std::string&);
// The same of a path, which no program takes for an option.
std::string shell_path(const std::string&);
// A word that was met, for a message: printable, in quotes, and not a page long: of what is cut its
// length is said.
std::string in_quotes(std::string_view word, size_t most = 60);
// A message whose words of more than 200 characters (of paths: 4096) show their first 60 and how
// many entries or characters they have.
std::string with_long_words_cut(std::string_view);
// Text and attribute values of XML 1.0: escaped, and U+FFFD for what is not UTF-8 or not allowed.
std::string xml_text(const std::string&);

}  // namespace shardproof::telling
