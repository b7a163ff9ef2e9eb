#include "oracle/printable.hpp"

#include <algorithm>
#include <cstdint>

namespace shardproof::telling {

namespace {

// Length of the well-formed UTF-8 sequence at `at` whose character XML 1.0 allows; 0: none.
size_t allowed_character(const std::string& s, size_t at) {
  auto byte = [&](size_t i) { return at + i < s.size() ? uint8_t(s[at + i]) : uint8_t(0); };
  const uint8_t b = byte(0);
  if (b < 0x80) return b >= 0x20 || b == '\t' || b == '\n' || b == '\r' ? 1 : 0;
  const size_t n = b >= 0xc2 && b < 0xe0   ? 2
                   : b >= 0xe0 && b < 0xf0 ? 3
                   : b >= 0xf0 && b < 0xf5 ? 4
                                           : 0;
  if (n == 0) return 0;
  uint32_t code = b & (0xffu >> (n + 1));
  for (size_t i = 1; i < n; i++) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  const bool overlong = (n == 3 && code < 0x800) || (n == 4 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool outside = code == 0xfffe || code == 0xffff || code > 0x10ffff;
  return overlong || surrogate || outside ? 0 : n;
}

// U+0080 to U+009F: of these, too, some steer a terminal.
bool is_c1_control(const std::string& s, size_t at) {
  return s[at] == '\xc2' && at + 1 < s.size() && uint8_t(s[at + 1]) < 0xa0;
}

std::string escaped(char c) {
  constexpr const char* digits = "0123456789abcdef";
  return std::string("\\x") + digits[uint8_t(c) >> 4] + digits[uint8_t(c) & 15];
}

}  // namespace

std::string printable(const std::string& text) {
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const size_t n = allowed_character(text, at);
    const char c = text[at];
    const bool steers = n == 0 || c == '\t' || c == '\r' || c == 0x7f || is_c1_control(text, at);
    for (const size_t end = at + std::max<size_t>(n, 1); at < end; ++at)
      shown += steers ? escaped(text[at]) : std::string(1, text[at]);
  }
  return shown;
}

std::string one_line(const std::string& text) {
  std::string shown = printable(text);
  for (size_t at; (at = shown.find('\n')) != std::string::npos;) shown.replace(at, 1, "\\x0a");
  return shown;
}

namespace {

// "20001 entries" of a list, "300 characters" of anything else.
std::string length_of(std::string_view word) {
  const auto commas = std::count(word.begin(), word.end(), ',');
  return commas > 0 ? std::to_string(commas + 1) + " entries"
                    : std::to_string(word.size()) + " characters";
}

constexpr size_t of_a_long_word = 60;  // that is shown

}  // namespace

std::string in_quotes(std::string_view word, size_t most) {
  return "'" + one_line(std::string(word.substr(0, most))) +
         (word.size() > most ? "...' (" + length_of(word) + ")" : "'");
}

std::string with_long_words_cut(std::string_view text) {
  constexpr size_t longest = 200, longest_path = 4096;
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    std::string_view word = text.substr(at, end - at), mark;  // of the sentence, not of the word
    if (word.ends_with(';') || word.ends_with(',')) mark = word.substr(word.size() - 1);
    word.remove_suffix(mark.size());
    if (word.size() <= (word.find('/') == word.npos ? longest : longest_path))
      shown += word;
    else
      shown.append(word.substr(0, of_a_long_word)).append("... (" + length_of(word) + ")");
    shown += mark;
    if (end < text.size()) shown += ' ';
    at = end + 1;
  }
  return shown;
}

std::string shell_word(const std::string& word) {
  if (!word.empty() && one_line(word) == word &&
      word.find_first_of(" '\"\\$`*?[]{}()<>|&;#~") == std::string::npos)
    return word;
  std::string plain, escaped;
  for (char c : word) {
    plain += c == '\'' ? std::string("'\\''") : std::string(1, c);
    escaped += (c == '\'' || c == '\\' ? "\\" : "") + std::string(1, c);
  }
  return one_line(word) == word ? "'" + plain + "'" : "$'" + one_line(escaped) + "'";
}

std::string shell_path(const std::string& path) {
  return shell_word(path.starts_with('-') ? "./" + path : path);
}

std::string xml_text(const std::string& text) {
  std::string xml;
  for (size_t at = 0; at < text.size();) {
    const size_t n = allowed_character(text, at);
    const char c = text[at];
    if (n == 0)
      xml += "\xef\xbf\xbd";  // U+FFFD
    else if (c == '&')
      xml += "&amp;";
    else if (c == '<')
      xml += "&lt;";
    else if (c == '>')
      xml += "&gt;";
    else if (c == '"')
      xml += "&quot;";
    else if (c == '\t' || c == '\n' || c == '\r')
      xml += "&#" + std::to_string(int(c)) + ";";
    else
      xml.append(text, at, n);
    at += n == 0 ? 1 : n;
  }
  return xml;
}

}  // namespace shardproof::telling
