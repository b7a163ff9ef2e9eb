#include "oracle/prepared/case_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "fixtures/sharding.hpp"
#include "oracle/command.hpp"
#include "oracle/cost.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/printable.hpp"
#include "oracle/run.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::prepared {
namespace {

namespace fs = std::filesystem;

std::string hex(XXH128_hash_t h) { return fmt::format("{:016x}{:016x}", h.high64, h.low64); }

template <class List, class Text>
std::string list_of(const List& list, Text text) {
  std::string all;
  for (const auto& entry : list) all += (all.empty() ? "" : ", ") + text(entry);
  return "[" + all + "]";
}
std::string texts(const std::vector<std::string>& list) { return list_of(list, json_text); }
std::string numbers(std::span<const int64_t> list) {
  return fmt::format("[{}]", joined(list, ","));
}
std::string flag(bool b) { return b ? "true" : "false"; }
std::string dtype_text(DType d) { return json_text(tensors::format_name(d)); }

std::string object(const std::vector<std::pair<std::string, std::string>>& members) {
  std::string all;
  for (const auto& [name, value] : members)
    all += fmt::format("{}\"{}\": {}", all.empty() ? "" : ", ", name, value);
  return "{" + all + "}";
}
std::string rows(const std::vector<std::string>& objects) {
  return objects.empty() ? "[]" : fmt::format("[\n    {}\n  ]", joined(objects, ",\n    "));
}

std::string mesh_text(const Mesh& mesh) {
  std::vector<std::pair<std::string, std::string>> members;
  for (Axis a : mesh.order()) members.emplace_back(name(a), std::to_string(mesh.size(a)));
  return object(members);
}

// Ranks of each group of every axis above 1, the two parts of tp included where it is split.
std::string groups_text(const Mesh& mesh) {
  std::vector<Axis> axes = mesh.order();
  if (mesh.size(Axis::rep) > 1) axes.insert(axes.end(), {Axis::kv, Axis::rep});
  std::vector<std::pair<std::string, std::string>> members;
  for (Axis a : axes)
    if (mesh.size(a) > 1)
      members.emplace_back(name(a), list_of(mesh.groups({a}), [](const std::vector<int>& g) {
                             return fmt::format("[{}]", joined(g, ","));
                           }));
  return object(members);
}

std::string keys_text(const std::vector<std::pair<std::string, std::string>>& keys) {
  std::vector<std::pair<std::string, std::string>> members;
  for (const auto& [key, value] : keys) members.emplace_back(key, json_text(value));
  return object(members);
}

std::string tensor_text(const Plan& plan, int operand) {
  const Evidence& e = plan.evidence;
  const Operand& o = e.operands[size_t(operand)];
  const Named value{o.name, operand, false}, gradient{"grad." + o.name, operand, true};
  std::vector<std::string> locals;
  for (int r = 0; r < e.mesh.world(); ++r) locals.push_back(numbers(plan.local_shape_of(value, r)));
  std::vector<std::pair<std::string, std::string>> members{
      {"name", json_text(o.name)},
      {"role", json_text(role_name(o.role))},
      {"dtype", dtype_text(plan.dtype_of(value))},
      {"global_shape", numbers(o.shape)},
      {"layout", json_text(text(o.layout))},
      {"local_shapes", "[" + joined(locals, ", ") + "]"}};
  if (e.declared.backward && o.role != Operand::index) {
    members.emplace_back("gradient", flag(o.gradient));
    members.emplace_back("gradient_layout", json_text(text(dual(o.layout))));
    members.emplace_back("gradient_dtype", dtype_text(plan.dtype_of(gradient)));
  }
  return object(members);
}

std::string step_text(const Step& s) {
  const auto name_of = [](const Named& n) { return json_text(n.name); };
  std::vector<std::pair<std::string, std::string>> members{
      {"do", s.backward ? "\"backward\"" : "\"forward\""},
      {"prefix", json_text(s.prefix)},
      {"takes", list_of(s.takes, name_of)},
      {"gives", list_of(s.gives, name_of)}};
  if (!s.keys.empty()) members.emplace_back("keys", keys_text(s.keys));
  return object(members);
}

// All but the digests: what follows from line, checks and version.
std::string body_of(const Plan& plan) {
  const Evidence& e = plan.evidence;
  std::vector<std::string> operands, passes, unasked;
  for (int k = 0; k < int(e.operands.size()); ++k) operands.push_back(tensor_text(plan, k));
  for (const Pass& p : plan.passes)
    passes.push_back(fmt::format("{{\"name\": {}, \"accumulate\": {}, \"steps\": [\n      {}]}}",
                                 json_text(p.name), flag(p.accumulate),
                                 joined(
                                     [&] {
                                       std::vector<std::string> steps;
                                       for (const Step& s : p.steps) steps.push_back(step_text(s));
                                       return steps;
                                     }(),
                                     ",\n      ")));
  for (const Unasked& u : plan.unasked)
    unasked.push_back(object({{"check", json_text(u.check)}, {"why", json_text(u.why)}}));
  std::string all = "{\n";
  const auto member = [&](const char* name, const std::string& value) {
    all += fmt::format("  \"{}\": {},\n", name, value);
  };
  member("format", "\"shardproof.case\"");
  member("version", std::to_string(case_version));
  member("shardproof", json_text(SHARDPROOF_VERSION));
  member("line", json_text(print(*plan.line)));
  member("canonical", json_text(print_canonical(*plan.line)));
  member("contract", json_text(plan.line->contract));
  member("keys", keys_text(plan.line->keys));
  member("ranks", std::to_string(e.mesh.world()));
  member("mesh", mesh_text(e.mesh));
  member("groups", groups_text(e.mesh));
  member("asked", texts(plan.only));
  member("checks", texts(plan.checks));
  member("not_judged", rows(unasked));
  member("tensors", rows(operands));
  member("shots", rows(passes));
  return all;
}

std::string sealed(const std::string& text) {
  return fmt::format("{}  \"seal\": \"{}\"\n}}\n", text, digest_of(text));
}

bool seal_holds(const std::string& text) {
  const size_t at = text.rfind("  \"seal\": ");
  return at != text.npos && sealed(text.substr(0, at)) == text;
}

[[noreturn]] void refuse(const std::string& path, const std::string& expected,
                         const std::string& met) {
  throw BadInput(
      fmt::format("{}: expected {}, met {}; prepare the folder again", path, expected, met));
}

// A case of 64 ranks and hundreds of shots is below a MiB.
std::string text_of(const tensors::MappedFile& file) {
  constexpr size_t most = size_t(64) << 20;
  const auto bytes = file.bytes();
  if (bytes.size() > most)
    refuse(file.path(), fmt::format("at most {} bytes", most), std::to_string(bytes.size()));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

const JsonValue& member(const JsonValue& v, const std::string& name, JsonValue::Kind kind,
                        const std::string& path) {
  const JsonValue* found = v.find(name);
  const char* what = kind == JsonValue::text    ? "a text"
                     : kind == JsonValue::array ? "a list"
                                                : "a whole number";
  if (!found || found->kind != kind)
    refuse(path, fmt::format("{} under '{}'", what, name), found ? shown(*found) : "none");
  return *found;
}

JsonValue parsed(const std::string& text, const std::string& path, const std::string& format) {
  JsonValue v = parse_json(text, path);
  if (v.kind != JsonValue::object) refuse(path, "an object", shown(v));
  const JsonValue* is = v.find("format");
  if (!is || is->words != format)
    refuse(path, fmt::format("the format '{}'", format), is ? shown(*is) : "none");
  const JsonValue& version = member(v, "version", JsonValue::integer, path);
  const JsonValue& program = member(v, "shardproof", JsonValue::text, path);
  if (version.whole != case_version || program.words != SHARDPROOF_VERSION)
    refuse(path, fmt::format("version {} by shardproof {}", case_version, SHARDPROOF_VERSION),
           fmt::format("version {} by shardproof {}", version.whole, in_quotes(program.words)));
  return v;
}

// The first line in which an edited file differs from what was prepared.
[[noreturn]] void refuse_edited(const std::string& path, const std::string& met,
                                const std::string& due) {
  size_t at = 0;
  while (at < met.size() && at < due.size() && met[at] == due[at]) ++at;
  const auto line = 1 + std::count(due.begin(), due.begin() + std::ptrdiff_t(at), '\n');
  const auto around = [&](const std::string& s) {
    return at < s.size() ? in_quotes(s.substr(at - std::min<size_t>(at, 12), 36))
                         : std::string("the end");
  };
  refuse(path, fmt::format("what was prepared, {}, in line {}", around(due), line),
         around(met) + ", edited after that");
}

// What was edited is told by writing the case again. A line that somebody made large is not
// computed for that.
void refuse_large_edit(const std::string& path, const Case& line, const Registry& registry) {
  std::string large;
  try {
    check_world(line);
    refuse_too_big(line, {}, registry);
  } catch (const BadInput& e) {
    large = e.what();
  }
  if (!large.empty())
    refuse(path, "what was prepared", "a text whose seal does not hold, edited after that");
}

}  // namespace

std::string digest_of(std::span<const std::byte> bytes) {
  return hex(XXH3_128bits(bytes.data(), bytes.size()));
}
std::string digest_of(const std::string& text) {
  return hex(XXH3_128bits(text.data(), text.size()));
}

std::string digest_of(const tensors::MappedFile& file) {
  constexpr size_t piece = size_t(32) << 20;
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  const auto bytes = file.bytes();
  for (size_t at = 0; at < bytes.size(); at += piece) {
    const auto part = bytes.subspan(at, std::min(piece, bytes.size() - at));
    XXH3_128bits_update(state, part.data(), part.size());
    tensors::give_pages_back(part);
  }
  const std::string digest = hex(XXH3_128bits_digest(state));
  XXH3_freeState(state);
  return digest;
}

std::string case_digest(const Plan& plan) { return digest_of(body_of(plan)); }

std::string case_text(const Plan& plan, const std::vector<std::string>& files) {
  std::vector<std::string> entries;
  for (size_t r = 0; r < files.size(); ++r)
    entries.push_back(object({{"in", json_text(in_file(int(r)))},
                              {"out", json_text(out_file(int(r)))},
                              {"in_xxh3", json_text(files[r])}}));
  const std::string body = body_of(plan);
  return sealed(fmt::format("{}  \"digest\": \"{}\",\n  \"files\": {},\n", body, digest_of(body),
                            rows(entries)));
}

// One that was given in place of what lies in it.
void refuse_folder_of_others(const std::string& folder) {
  std::vector<std::string> within;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    for (const char* name : {case_name, battery_name})
      if (fs::exists(entry.path() / name, error))
        within.push_back(entry.path().filename().string());
  if (within.empty()) return;
  std::sort(within.begin(), within.end());
  constexpr size_t few = 4;
  const size_t shown = std::min(within.size(), few);
  throw BadInput(fmt::format(
      "{}: expected the folder of one prepared case or battery, met one that holds {} ({}{}); name "
      "one of them: judge {}",
      folder, within.size(), joined(std::span(within).first(shown), ", "),
      within.size() > few ? ", ..." : "", telling::shell_path(fs::path(folder) / within[0])));
}

// `prepare` writes them last.
void require_prepared(const std::string& folder) {
  std::error_code error;
  const auto there = [&](const std::string& name) {
    return fs::exists(fs::path(folder) / name, error);
  };
  const auto begun = [&](auto of) {
    for (const auto& entry : fs::directory_iterator(folder, error))
      if (of(entry.path().filename().string(), entry.is_directory(error))) return true;
    return false;
  };
  if (there(case_name) || there(battery_name)) return;
  const bool of_case =
      begun([](const std::string& name, bool) { return name.starts_with("rank0.in.safetensors"); });
  if (!of_case && !begun([](const std::string& name, bool is_folder) {
        return is_folder && name.starts_with("000.");
      }))
    return refuse_folder_of_others(folder);
  const char* last = of_case ? case_name : battery_name;
  throw BadInput(fmt::format(
      "{}: expected the file that `prepare` writes last, met nothing there: it was interrupted in "
      "this folder, or the folder was moved or copied in part; bring the file along, or "
      "prepare the folder again",
      (fs::path(folder) / last).string()));
}

CaseFile read_case(const std::string& folder, const Registry& registry, bool given_in_files) {
  require_prepared(folder);
  const std::string path = fs::path(folder) / case_name;
  const std::string text = text_of(tensors::MappedFile(path));
  const JsonValue v = parsed(text, path, "shardproof.case");
  CaseFile c;
  std::vector<std::string> only;
  for (const JsonValue& check : member(v, "asked", JsonValue::array, path).items)
    only.push_back(check.words);
  const std::string canonical = member(v, "canonical", JsonValue::text, path).words;
  try {
    for (const std::string& check : only) check_named(check);
    const Case line = parse(canonical, registry);
    if (!seal_holds(text)) refuse_large_edit(path, line, registry);
    c.plan = plan_of(line, only, registry, given_in_files);
  } catch (const BadInput& e) {
    const std::string why = e.what();
    throw BadInput(why.starts_with(path) ? why : fmt::format("{}: {}", path, why));
  }
  for (const JsonValue& file : member(v, "files", JsonValue::array, path).items) {
    const JsonValue* digest = file.find("in_xxh3");
    c.files.push_back(digest ? digest->words : "");
  }
  const std::string due = case_text(c.plan, c.files);
  if (due != text || int(c.files.size()) != c.plan.evidence.mesh.world())
    refuse_edited(path, text, due);
  c.digest = case_digest(c.plan);
  return c;
}

std::string battery_text(const std::vector<Member>& members) {
  std::vector<std::string> entries;
  for (const Member& m : members)
    entries.push_back(object({{"folder", json_text(m.folder)},
                              {"digest", json_text(m.digest)},
                              {"line", json_text(m.line)}}));
  return sealed(
      fmt::format("{{\n  \"format\": \"shardproof.battery\",\n  \"version\": {},\n  "
                  "\"shardproof\": {},\n  \"cases\": {},\n",
                  case_version, json_text(SHARDPROOF_VERSION), rows(entries)));
}

std::vector<Member> read_battery(const std::string& folder) {
  const std::string path = fs::path(folder) / battery_name;
  const std::string text = text_of(tensors::MappedFile(path));
  const JsonValue v = parsed(text, path, "shardproof.battery");
  std::vector<Member> members;
  for (const JsonValue& entry : member(v, "cases", JsonValue::array, path).items) {
    Member m;
    for (const auto& [field, to] : {std::pair{"folder", &m.folder}, std::pair{"digest", &m.digest},
                                    std::pair{"line", &m.line}})
      *to = member(entry, field, JsonValue::text, path).words;
    if (m.folder.find('/') != std::string::npos || m.folder.starts_with(".."))
      refuse(path, "folders beside it", in_quotes(m.folder));
    members.push_back(std::move(m));
  }
  if (const std::string due = battery_text(members); due != text) refuse_edited(path, text, due);
  return members;
}

bool is_battery(const std::string& folder) {
  std::error_code error;
  return fs::exists(fs::path(folder) / battery_name, error);
}

}  // namespace shardproof::prepared
