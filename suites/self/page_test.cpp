// index.html: what it is drawn from, and what a browser makes of it. Numbers are those of the
// report; what a report holds stays text, whatever it is.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "oracle/drift.hpp"
#include "oracle/json.hpp"
#include "oracle/report.hpp"
#include "oracle/report_page.hpp"
#include "oracle/report_read.hpp"

namespace shardproof {
namespace {
namespace page_test {

namespace fs = std::filesystem;

constexpr double inf = std::numeric_limits<double>::infinity();

// Each tries to become an element, to end the script that holds the data, or to run.
const std::vector<std::string> hostile = {
    "<img src=x onerror=\"document.documentElement.dataset.owned=1\">",
    "</script><script>document.documentElement.dataset.owned=1</script>",
    "<!--<script>",
    "\"><svg onload=\"document.documentElement.dataset.owned=1\">",
    "&lt;b&gt;",
    "bytes \xff\xc3 and \x01 and \xe2\x80\xa8"};

CaseResult passed(const std::string& line, double ratio) {
  CaseResult c;
  c.line = c.canonical = line;
  c.replay = "run " + line;
  c.family = "linear", c.contract = "linear_row", c.lane = "processes.np4";
  CheckResult forward, ledger;
  forward.check = "forward", forward.verdict = Verdict::passed, forward.ratio = ratio;
  ledger.check = "ledger", ledger.verdict = Verdict::passed;
  c.checks = {forward, ledger};
  return c;
}

CaseResult failed(const std::string& line, const std::string& message) {
  CaseResult c = passed(line, 0.5);
  c.checks[0].verdict = Verdict::failed;
  Finding f;
  f.check = "forward", f.tensor = "y", f.message = message, f.ratio = inf;
  c.checks[0].findings = {f};
  return c;
}

ControlResult control(const std::string& name, ControlResult::Outcome outcome, double margin) {
  ControlResult c;
  c.name = name;
  c.family = "linear", c.contract = "linear_row";
  c.expected_check = "forward,ledger";
  c.caught_by = outcome == ControlResult::caught ? "forward,ledger" : "ledger";
  c.witness = "linear_row control=" + name;
  c.replay = "run " + c.witness;
  c.outcome = outcome;
  c.margin = margin, c.ratio = 100, c.bound = 1e-12;
  if (outcome == ControlResult::caught)
    c.catches = {{"forward", 100, margin, false}, {"ledger", inf, inf, true}};
  return c;
}

// 3 cases, 6 checks of which 1 failed; 3 broken runs of which 2 are caught.
Report report() {
  Report r;
  r.complete = true;
  r.program = "build/shardproof";
  r.command = "build/shardproof gate --report r";
  r.cases = {passed("linear_row tp=2", 0.25), passed("linear_row tp=4", 0.75),
             failed("linear_row tp=8", "odd")};
  r.controls = {control("bias_twice", ControlResult::caught, 41),
                control("bias_twice", ControlResult::caught, 17),
                control("unseen", ControlResult::wrong_check, 0)};
  r.lanes = {{"processes.np4", true, ""}, {"mpi.np8", false, "no mpiexec"}};
  r.wall_seconds = 34;
  return r;
}

std::string data_text(const std::string& page) {
  const std::string opening = "<script type=\"application/json\" id=\"data\">";
  const size_t from = page.find(opening) + opening.size();
  return page.substr(from, page.find("</script>", from) - from);
}
JsonValue data_of(const std::string& page) { return parse_json(data_text(page), "data"); }

const JsonValue& at(const JsonValue& v, const std::string& path) {
  const JsonValue* here = &v;
  std::istringstream words(path);
  for (std::string word; std::getline(words, word, '.');) {
    here = std::isdigit(static_cast<unsigned char>(word[0])) ? &here->items.at(std::stoul(word))
                                                             : here->find(word);
    if (!here) throw std::out_of_range(path);
  }
  return *here;
}

TEST(Page, SumsWhatPassedAndListsWhatDidNot) {
  const JsonValue d = data_of(index_html(report()));
  EXPECT_EQ(at(d, "word").words, "NO JUDGEMENT");
  EXPECT_EQ(at(d, "summary.checks").whole, 6);
  EXPECT_EQ(at(d, "summary.failed").whole, 1);
  EXPECT_EQ(at(d, "summary.controls_caught").whole, 2);
  // forward of two cases, ledger of three; the worst of both forwards with its line.
  const JsonValue& rows = at(d, "passing.rows");
  ASSERT_EQ(rows.items.size(), 2u);
  EXPECT_EQ(at(rows, "0.4").whole, 2);
  EXPECT_EQ(at(rows, "0.5").number, 0.75);
  EXPECT_EQ(at(d, "passing.lines").items.at(size_t(at(rows, "0.6").whole)).words,
            "linear_row tp=4");
  EXPECT_EQ(at(rows, "1.4").whole, 3);
  EXPECT_EQ(at(rows, "1.5").kind, JsonValue::null);
  ASSERT_EQ(at(d, "failing").items.size(), 2u);
  EXPECT_EQ(at(d, "failing.0.verdict").words, "wrong_check");
  EXPECT_EQ(at(d, "failing.1.replay").words, "run linear_row tp=8 --check forward");
}

TEST(Page, TheMatrixHoldsTheWeakestMarginOfEachCheck) {
  const JsonValue d = data_of(index_html(report()));
  ASSERT_EQ(at(d, "controls").items.size(), 2u);
  EXPECT_EQ(at(d, "controls.0.name").words, "unseen");  // what was not caught comes first
  EXPECT_EQ(at(d, "controls.0.unseen.0").words, "forward");
  EXPECT_EQ(at(d, "controls.0.lost").whole, 1);
  EXPECT_EQ(at(d, "controls.1.runs").whole, 2);
  EXPECT_EQ(at(d, "controls.1.cells.forward.margin").number, 17);
  EXPECT_EQ(at(d, "controls.1.cells.forward.exact").truth, false);
  EXPECT_EQ(at(d, "controls.1.cells.ledger.exact").truth, true);
}

TEST(Page, HoldsNoTagThatAReportBrings) {
  for (const std::string& text : hostile) {
    Report r = report();
    r.cases.push_back(failed("linear_row x=" + text, text));
    r.cases.back().family = r.cases.back().contract = r.cases.back().lane = text;
    r.controls[0].name = r.controls[0].imitates = text;
    r.lanes[1].reason = r.command = r.program = text;
    r.versions = {{text, text}};
    r.not_due = {text};
    const std::string page = index_html(r);
    EXPECT_EQ(data_text(page).find('<'), std::string::npos) << text;
    EXPECT_NO_THROW(data_of(page)) << text;
  }
}

TEST(Page, StaysSmallWhateverRan) {
  Report r = report();
  for (int i = 0; i < 16000; i++)
    r.cases.push_back(passed(fmt::format("linear_row tp=4 seed={}", i), 1e-3 * (i % 900)));
  for (int i = 0; i < 7000; i++)
    r.controls.push_back(control(fmt::format("c{}", i % 40), ControlResult::caught, 41));
  EXPECT_LT(index_html(r).size(), size_t(300) << 10);
  for (int i = 0; i < 5000; i++)
    r.cases.push_back(failed(std::string(5000, 'x') + std::to_string(i), std::string(9000, 'm')));
  const std::string page = index_html(r);
  EXPECT_LT(page.size(), size_t(6) << 20);
  const JsonValue d = data_of(page);
  EXPECT_EQ(at(d, "failing").items.size() + size_t(at(d, "failing_left_out").whole), 5002u);
}

DriftReport drifted() {
  DriftReport d;
  d.line = "block tp=2";
  d.steps = 50;
  Sighting s;
  s.check = "gradient against the reference", s.step = 20, s.phase = "after backward";
  s.finding.tensor = "norm.weight";
  d.seen = {s};
  for (int step = 20; step < 50; step++) d.distance.push_back({step, 1e-7 * step});
  return d;
}

TEST(Page, OfADriftRunHoldsTheDistanceByStep) {
  DriftReport r = drifted();
  const DriftLine line;
  JsonValue d = data_of(drift_html(r, line, {}, "sp", "sp drift block tp=2"));
  EXPECT_EQ(at(d, "word").words, "DRIFT");
  ASSERT_EQ(at(d, "distance").items.size(), 30u);
  EXPECT_EQ(at(d, "distance.0.0").whole, 20);
  EXPECT_EQ(at(d, "distance.29.1").number, 1e-7 * 49);
  // A long run is thinned: the ends and the greatest of each stretch stay.
  r.distance.clear();
  for (int step = 0; step < 100001; step++) r.distance.push_back({step, step == 77777 ? 9.0 : 1.0});
  d = data_of(drift_html(r, line, {}, "sp", ""));
  const auto& points = at(d, "distance").items;
  EXPECT_LE(points.size(), 2002u);
  EXPECT_EQ(points.front().items[0].whole, 0);
  EXPECT_EQ(points.back().items[0].whole, 100000);
  EXPECT_EQ(std::count_if(points.begin(), points.end(),
                          [](const auto& p) { return p.items[1].number == 9; }),
            1);
}

// ---- in a browser

std::string browser() {
  if (const char* given = std::getenv("CHROMIUM")) return given;
  std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "");
  for (std::string folder; std::getline(path, folder, ':');)
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (const fs::path program = fs::path(folder) / name; access(program.c_str(), X_OK) == 0)
        return program;
  return "";
}

class Browser : public testing::Test {
 protected:
  void SetUp() override {
    if (browser().empty())
      GTEST_SKIP()
          << "no Chromium here (Debian: apt-get install chromium), so nobody looks at the page";
    std::string name = fs::temp_directory_path() / "page_test_XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  void TearDown() override {
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  // The page as the browser has it after its script ran.
  std::string seen(const std::string& page, int width) {
    std::ofstream(folder_ / "index.html") << page;
    const pid_t child = fork();
    if (child == 0) {
      setpgid(0, 0);
      dup2(open((folder_ / "dom").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
      dup2(open((folder_ / "err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
      const std::string program = browser(),
                        profile = "--user-data-dir=" + (folder_ / "profile").string(),
                        size = fmt::format("--window-size={},900", width),
                        place = "file://" + (folder_ / "index.html").string();
      // Without its sandbox: it refuses to start one as root. It sees a page of ours only.
      execl(program.c_str(), program.c_str(), "--headless", "--no-sandbox", "--disable-gpu",
            "--no-first-run", "--disable-dev-shm-usage", "--virtual-time-budget=5000",
            profile.c_str(), size.c_str(), "--dump-dom", place.c_str(), nullptr);
      _exit(126);
    }
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > until) {
        kill(-child, SIGKILL);
        waitpid(child, &status, 0);
        ADD_FAILURE() << "the browser did not end within two minutes";
        return "";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::ostringstream dom;
    dom << std::ifstream(folder_ / "dom").rdbuf();
    return dom.str();
  }

  fs::path folder_;
};

std::string between(const std::string& text, const std::string& from, const std::string& to) {
  const size_t start = text.find(from);
  if (start == std::string::npos) return "";
  return text.substr(start + from.size(), text.find(to, start) - start - from.size());
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Browser, ShowsTheNumbersOfReportJson) {
  Report r = report();
  for (int i = 0; i < 2000; i++)
    r.cases.push_back(passed(fmt::format("linear_row tp=4 seed={}", i), 0.5));
  const std::string dom = seen(index_html(r), 1100);
  const JsonValue json = parse_json(report_json(r), "report.json");
  ASSERT_TRUE(holds(dom, "<h1 id=\"verdict\">NO JUDGEMENT</h1>")) << dom.substr(0, 3000);
  int shown = 0;
  for (const auto& [name, n] : json.find("summary")->members) {
    const std::string cell = between(dom, "<data id=\"n-" + name + "\" value=\"", "</data>");
    if (cell.empty()) continue;
    shown++;
    EXPECT_EQ(cell.substr(0, cell.find('"')), std::to_string(n.whole)) << name;
    std::string digits;  // as they are read, without the space between thousands
    for (const char c : cell.substr(cell.find('>') + 1))
      if (std::isdigit(static_cast<unsigned char>(c))) digits += c;
    EXPECT_EQ(digits, std::to_string(n.whole)) << name;
  }
  EXPECT_EQ(shown, 17) << "cases, checks, seven verdicts, controls and the ways they end";
  // 4006 checks; of them one row for each sum and for what failed.
  EXPECT_TRUE(holds(dom, "4\u202f006 checks in 3 rows")) << between(dom, "id=\"matching\"", "</p>");
  EXPECT_TRUE(holds(dom, "data-copy=\"build/shardproof run linear_row tp=8 --check forward\""));
  EXPECT_TRUE(holds(dom, ">17</td>"));  // the weakest margin in the matrix
  EXPECT_TRUE(holds(dom, "no mpiexec"));
  EXPECT_TRUE(holds(dom, "<circle class=\"healthy\""));
}

TEST_F(Browser, DrawsADriftRun) {
  const std::string dom = seen(drift_html(drifted(), {}, {}, "sp", "sp drift block tp=2"), 390);
  EXPECT_TRUE(holds(dom, "<h1 id=\"verdict\">DRIFT</h1>")) << dom.substr(0, 3000);
  EXPECT_TRUE(holds(dom, "<path class=\"curve\""));
  EXPECT_TRUE(holds(dom, "step 49: 4.9e-6</title>"));
}

TEST_F(Browser, LeavesHostileTextText) {
  Report r = report();
  for (const std::string& text : hostile) {
    r.cases.push_back(failed("linear_row x=" + text, text));
    r.cases.back().family = r.cases.back().contract = r.cases.back().lane = text;
    r.controls.push_back(control(text, ControlResult::escaped, 0));
    r.controls.back().family = r.controls.back().imitates = text;
    r.lanes.push_back({text, false, text});
    r.versions[text] = text;
    r.command += text;
  }
  const std::string dom = seen(index_html(r), 1100);
  EXPECT_TRUE(holds(dom, "<h1 id=\"verdict\">")) << dom.substr(0, 3000);
  EXPECT_EQ(between(dom, "<html", ">"), " lang=\"en\"");  // no payload marked it
  EXPECT_TRUE(holds(dom, "linear_row x=&lt;img src=x onerror="));
  EXPECT_TRUE(holds(dom, "linear_row x=&lt;/script&gt;&lt;script&gt;"));
}

// The test above can fail: a page that takes the same text as markup is marked.
TEST_F(Browser, WouldBeMarkedByHostileMarkup) {
  const std::string dom =
      seen("<!doctype html><html lang=\"en\"><body>" + hostile[0] + "</body></html>", 800);
  EXPECT_EQ(between(dom, "<html", ">"), " lang=\"en\" data-owned=\"1\"");
}

}  // namespace page_test
}  // namespace
}  // namespace shardproof
