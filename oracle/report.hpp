// How a report is told: in the terminal, as report.json, junit.xml, summary.md and
// index.html (report_page.hpp).
#pragma once
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oracle/gate.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

// The block of a failing case: FAILED / HUNG / CRASHED / VACUOUS, at, means, passed, replay.
std::string block(const CaseResult&, const std::string& program);
// The block of a control that was not caught by its named check.
std::string block(const ControlResult&, const std::string& program);
// One line for a case that passed, and one for each check with a note (run prints it).
std::string passed_line(const CaseResult&);
// self, one line a family, lanes, verdict, try.
std::string closing(const Report&);
// Table of controls: control, imitates, expected check, caught by, ratio, margin, witness; failures
// first.
std::string controls_table(const Report&);

// Draws on a terminal, else a line every 10 s; prints blocks of failures as they come.
// `clock` gives seconds; null: the steady clock.
std::unique_ptr<Progress> terminal_progress(std::FILE*, const std::string& program,
                                            bool is_terminal,
                                            std::function<double()> clock = nullptr);

// Colours are for people: a terminal that is not dumb, and NO_COLOR unset or empty.
bool wants_colour(bool is_terminal);
// The words that open lines (FAILED, PASSED, NO JUDGEMENT ...) in colour.
std::string paint(const std::string& text);

// Throws BadInput when the folder cannot be made or written to (to be called before the run).
void check_report_folder(const std::string& folder, const std::string& option = "--report");
// The same, of what is there before anything is made; "" is no folder.
void refuse_unwritable(const std::string& folder, const std::string& option = "--report");
// A file of the folder, complete or not there. Throws Infrastructure.
void write_whole(const std::string& folder, const std::string& name, const std::string& text);
// Writes report.json, junit.xml, summary.md, index.html, each to a temporary name and then renamed.
// Signals that end a run wait until all of them are there. Throws Infrastructure when it cannot.
void write_report(const Report&, const std::string& folder);
std::string report_json(const Report&);
std::string junit_xml(const Report&);
std::string summary_markdown(const Report&);
// Workflow commands of GitHub: the ten worst findings, and where the rest is ("" no report).
std::string github_annotations(const Report&, const std::string& report_folder);
// Canonical lines of what did not pass in an earlier report (gate --failed). Throws BadInput.
struct FailedLine {
  std::string line;
  bool control = false;  // of a broken run; else its subject was judged, be it a twin
};
// `complete`, where it is given: whether that run reached its end.
std::vector<FailedLine> failed_lines(const std::string& folder, bool* complete = nullptr);

}  // namespace shardproof
