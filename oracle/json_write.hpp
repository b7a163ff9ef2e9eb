// JSON that is written without a tree. Texts are json_text's (json.hpp).
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace shardproof::json_write {

// Every digit that it takes; what JSON cannot hold as the words "inf", "-inf" and "nan".
std::string number(double);
// Of values that are JSON already.
std::string list(const std::vector<std::string>& values);
std::string object(const std::vector<std::pair<std::string, std::string>>& members);
std::string texts(const std::vector<std::string>&);
// As it may stand in a <script> of a page: no '<' in it, so no tag of any kind.
std::string in_script(const std::string& json);

}  // namespace shardproof::json_write
