// index.html: the report to look at, one file that fetches nothing. The page itself is in
// oracle/page/; here is what it shows, bounded whatever ran.
#pragma once
#include <string>

#include "oracle/verdict.hpp"

namespace shardproof {

std::string index_html(const Report&);
// The page around data of its own: {"kind": ..., "word": ..., "sentence": ..., ...} of page.js.
std::string page_around(const std::string& json);

}  // namespace shardproof
