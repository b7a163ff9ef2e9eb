// What a run says while it runs: blocks of failures as they come, and one line of progress, drawn
// over itself on a terminal and repeated every ten seconds elsewhere.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "oracle/clock.hpp"
#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/time_left.hpp"

namespace shardproof {

using namespace telling;

namespace {

constexpr double redraw_seconds = 0.1, line_seconds = 10;
constexpr double slow_seconds = 5;      // from then on a case is named
constexpr int narrowest_terminal = 79;  // a wrapped line could not be drawn over
constexpr int most_blocks = 20;         // in full; those behind them have one line each

std::string duration(double s) {
  if (s < 60) return fmt::format("{:.0f} s", s);
  const long minutes = long(s) / 60;
  return minutes < 60 ? fmt::format("{} min {:02} s", minutes, long(s) % 60)
                      : fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

bool unremarkable(const CaseResult& c) {
  const CheckResult* first = headline(c);
  return first && lets_pass(first->verdict);
}
bool unremarkable(const ControlResult& c) {
  return !weak(c) && c.outcome != ControlResult::escaped && c.outcome != ControlResult::wrong_check;
}

class TerminalProgress : public Progress {
 public:
  TerminalProgress(std::FILE* out, std::string program, bool terminal,
                   std::function<double()> clock)
      : out_(out),
        program_(std::move(program)),
        terminal_(terminal),
        colour_(wants_colour(terminal)),
        clock_(clock ? std::move(clock) : now) {
    start_ = last_ = clock_();
  }
  ~TerminalProgress() override { wipe(); }

  void expect(const Pace& pace, int64_t count, double weight) override {
    left_.due(pace, count, weight);
  }
  void begin(int64_t cases, int64_t controls) override {
    due_cases_ = cases;
    due_controls_ = controls;
    start_ = last_ = clock_();
    if (terminal_) draw();
  }
  void done(const CaseResult& c) override {
    cases_++;
    left_.done({Pace::a_case, c.contract, alone(c.lane)}, c.seconds);
    tell(c);
  }
  void done(const ControlResult& c) override {
    controls_++;
    if (c.kind.empty()) left_.done({Pace::a_control, c.contract, alone(c.lane)}, c.seconds);
    tell(c);
  }
  void tried(const Pace& pace, double seconds) override { left_.done(pace, seconds); }
  void begun(int64_t process, const std::string& line) override {
    if (line.empty())
      at_.erase(process);
    else
      at_[process] = {clock_(), line};
  }
  void tick() override {
    if (clock_() - last_ < (terminal_ ? redraw_seconds : line_seconds)) return;
    draw();
  }

 private:
  static bool alone(const std::string& lane) { return lane.starts_with("mpi."); }

  template <class Result>
  void tell(const Result& result) {
    if (!unremarkable(result)) {
      bad_++;
      wipe();
      std::string text = block(result, program_);
      if (bad_ > most_blocks) text.erase(text.find('\n'));
      text += '\n';
      if (colour_) text = paint(text);
      std::fputs(text.c_str(), out_);
      std::fflush(out_);
    }
    tick();
  }

  // Operators, and the healthy runs of their witnesses, are found while the run goes on: they are
  // counted, not promised.
  std::string line() const {
    std::string text = number_of(std::max(cases_, due_cases_), "case");
    if (cases_ <= due_cases_) text = fmt::format("{} of {}", cases_, text);
    if (const std::string slow = slowest(); !slow.empty())
      return text + fmt::format("   {} did not pass   ", bad_) + slow;
    if (controls_ > due_controls_)
      text += ", " + number_of(controls_, "control");
    else if (due_controls_ > 0)
      text += fmt::format(", {} of {}", controls_, number_of(due_controls_, "control"));
    text += fmt::format("   {} did not pass", bad_);
    if (const auto left = left_.seconds(last_ - start_); left && *left > 0)
      text += "   about " + duration(*left) + " left";
    return text;
  }

  // A terminal has room for it in place of how much is left, which such a case makes doubtful.
  std::string slowest() const {
    if (at_.empty()) return "";
    const auto& [since, line] = std::min_element(at_.begin(), at_.end(), [](auto& a, auto& b) {
                                  return a.second < b.second;
                                })->second;
    return last_ - since < slow_seconds ? ""
                                        : fmt::format("{} in {}", duration(last_ - since), line);
  }

  void draw() {
    last_ = clock_();
    if (terminal_) {
      std::fprintf(out_, "\r\033[K%.*s", narrowest_terminal, line().c_str());
      drawn_ = true;
    } else {
      std::fputs(row("progress", line()).c_str(), out_);
    }
    std::fflush(out_);
  }

  void wipe() {
    if (!drawn_) return;
    std::fputs("\r\033[K", out_);
    std::fflush(out_);
    drawn_ = false;
  }

  std::FILE* out_;
  std::string program_;
  bool terminal_, colour_, drawn_ = false;
  std::function<double()> clock_;
  double start_ = 0, last_ = 0;
  TimeLeft left_;
  std::map<int64_t, std::pair<double, std::string>> at_;  // by process, what it runs since when
  int64_t due_cases_ = 0, due_controls_ = 0, cases_ = 0, controls_ = 0;
  int bad_ = 0;
};

}  // namespace

std::unique_ptr<Progress> terminal_progress(std::FILE* out, const std::string& program,
                                            bool is_terminal, std::function<double()> clock) {
  return std::make_unique<TerminalProgress>(out, program, is_terminal, std::move(clock));
}

}  // namespace shardproof
