// What a case costs, known before it is run: a line that is legal may still be larger than a judge
// that keeps every result of every pass can hold, or than ranks can compute within a deadline.
//
//   N        elements of all operands, stacked over P and V axes
//   passes   forwards with their backwards over all shots; feeds: different data among them
//   bytes    of the parent and the ranks together
//            passes x 3 x 8 N     each result on its rank, in its record, read by the parent
//            feeds x 16 N         the truth; three times that where gauges of errors are due
//   work     multiplications, (passes + feeds) x
//            local matrix products, 7/2 x tokens^2 x features of a row where queries see keys (two
//            products forward, five backward), and 30 N: drawing, comparing and carrying an element
//            costs about as much
//   calls    passes x the calls that are due of the rank that makes most of them: each waits for
//            its peers, however little it carries
#pragma once
#include <string>
#include <vector>

#include "oracle/check.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

struct Cost {
  double bytes = 0, work = 0;
  double pass = 0;  // work of one pass
};
// Of the shots that are planned so far, and of as many further ones, each with data of its own.
Cost cost_of(const Evidence&, double further = 0);

// Calls of a rank in all passes; asked once of a line, whatever control or fault is on it.
double calls_of(const Evidence&);

// What a machine of today is taken for; slower ones have --deadline-scale. A call takes
// microseconds where ranks have a core each, and 5 ms where its peers wait for one.
inline constexpr double most_bytes = 0x1p32, multiplications_per_second = 1e8,
                        calls_per_second = 200, longest_case_seconds = 600;
// Seconds within which ranks must be through: 30 s and what the work and the calls take.
double deadline_of(const Evidence&);

// Throws BadInput where the planned shots, and what `checks` will plan for each sequence, need more
// memory or work than a case may.
void refuse_too_big(const Evidence&, const std::vector<std::string>& checks = {});
// What the operands alone say, of a line that is legal; before anything else is asked of it.
void refuse_too_many_elements(const Case&, const Registry&);
// The same before anything is planned.
void refuse_too_big(const Case&, const std::vector<std::string>& checks, const Registry&);
// The truth of one feed, inputs and results as doubles, or the data of all sequences are more than
// this machine's memory.
void refuse_beyond_memory(const Evidence&, const std::vector<std::string>& checks);
// plan_case without a limit but that: where results lie in files, a judge holds the truth alone,
// and ranks run wherever they run.
Evidence plan_case_of_any_size(const Case&, const Declared&, const std::vector<std::string>& checks,
                               const Registry&, bool given_in_files = false);

}  // namespace shardproof
