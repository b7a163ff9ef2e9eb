// A foreign program for prepared folders: our own kernels, right or broken, that answer by files.
#pragma once
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "oracle/checks/judging.hpp"
#include "oracle/prepared/case_file.hpp"
#include "oracle/prepared/judge.hpp"
#include "oracle/run.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof::foreign {

namespace fs = std::filesystem;

struct Answer {
  std::string control = {};  // the twin that answers; "": ours
  bool arguments = false;    // hands its arguments back, too
  // Changes what a rank hands in, before it is written.
  std::function<void(int rank, std::vector<tensors::TensorToWrite>&)> change = nullptr;
};

inline tensors::TensorToWrite held(const std::string& name, DType dtype, std::vector<int64_t> shape,
                                   std::vector<std::byte> bytes) {
  return {name, dtype, std::move(shape), [bytes = std::move(bytes)] { return bytes; }};
}

// A file of numpy, version 1.
inline std::string npy(const std::string& descr, const std::vector<int64_t>& shape,
                       const std::vector<std::byte>& bytes, bool fortran = false) {
  std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': ({}{}), }}", descr,
                  fortran ? "True" : "False", fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  header.resize((header.size() + 11) / 64 * 64 + 53, ' ');
  header += '\n';
  std::string file = "\x93NUMPY\x01";
  file += '\0';
  file += char(header.size() & 0xff);
  file += char(header.size() >> 8);
  file += header;
  return file.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Runs the kernels on the case of a folder and writes rankN.out.safetensors.
inline void answer(const std::string& folder, const Registry& registry, const Answer& how = {}) {
  using namespace prepared;
  const CaseFile c = read_case(folder, registry);
  Case line = *c.plan.line;
  line.set("control", how.control);
  Options options;
  Runner runner(options, registry);
  const Judged j = runner.run(line, c.plan.checks, "files");
  for (size_t p = 0; p < c.plan.passes.size(); ++p)
    if (const auto stopped = judging::incomplete(j.evidence, int(p)))
      throw std::runtime_error(print(line) + ": our own kernels " + stopped->message);
  for (int r = 0; r < line.world(); ++r) {
    std::vector<tensors::TensorToWrite> out;
    const tensors::SafetensorsFile in(fs::path(folder) / in_file(r));
    for (size_t p = 0; p < c.plan.passes.size(); ++p)
      for (size_t s = 0; s < c.plan.passes[p].steps.size(); ++s) {
        const Step& step = c.plan.passes[p].steps[s];
        for (const Named& n : step.gives)
          if (const ResultTensor* t = j.evidence.result(r, int(p), int(s), n.operand, n.gradient))
            out.push_back(held(n.name, t->dtype, t->shape, {t->bytes.begin(), t->bytes.end()}));
        for (const Named& n : step.takes)
          if (how.arguments) {
            const tensors::FileTensor* t = in->find(n.name);
            out.push_back(held(n.name, *t->dtype, t->shape, {t->bytes.begin(), t->bytes.end()}));
          }
      }
    if (how.change) how.change(r, out);
    tensors::write_safetensors(fs::path(folder) / out_file(r), std::move(out),
                               {{"case", c.digest}});
  }
}

// Says nothing while it judges.
inline Report judged(const std::string& folder, const Registry& registry) {
  Progress silent;
  return prepared::judge_folder(folder, {}, registry, silent);
}

// Names of the checks with a verdict, in report order.
inline std::vector<std::string> with(const Report& report, Verdict verdict) {
  std::vector<std::string> names;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks)
      if (check.verdict == verdict) names.push_back(check.check);
  return names;
}

}  // namespace shardproof::foreign
