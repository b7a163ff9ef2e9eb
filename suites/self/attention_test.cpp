// What the attention and packed families state: maps of tokens, packed documents, refusals, traffic
// in closed form, pairs a rank; and what their kernels do on ranks where a number is known.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "fixtures/context_maps.hpp"
#include "fixtures/packing.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/attention.hpp"
#include "primitives/loss_packed.hpp"
#include "primitives/rotary_context.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_attention(Registry&);
void family_attention_block(Registry&);
void family_packed(Registry&);
void controls_attention(Registry&);
void controls_attention_block(Registry&);
void controls_packed(Registry&);

namespace {
namespace attention_test {

using Shape = std::vector<int64_t>;
using Rows = std::vector<int64_t>;
using on_threads::Numbers;

constexpr double infinity = std::numeric_limits<double>::infinity();

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_attention(r);
    family_attention_block(r);
    family_packed(r);
    controls_attention(r);
    controls_attention_block(r);
    controls_packed(r);
    return r;
  }();
  return registry;
}

Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

std::string refusal(const std::string& text) {
  const Case line = line_of(text);
  const auto refused = contract_of(line).precondition(line);
  return refused ? refused->what() : "";
}

const char* const strategies[] = {"attention_allgather", "attention_ring", "attention_alltoall"};

// ---- Maps

TEST(ZigzagMap, ChunksRAndTheirMirror) {
  // 16 tokens, p = 4: chunks of 2.
  EXPECT_EQ(zigzag_map().owned(16, 4, 0), (Rows{0, 1, 14, 15}));
  EXPECT_EQ(zigzag_map().owned(16, 4, 3), (Rows{6, 7, 8, 9}));
  EXPECT_EQ(zigzag_map().owned(6, 1, 0), (Rows{0, 1, 2, 3, 4, 5}));
  EXPECT_THROW(zigzag_map().owned(12, 4, 0), std::invalid_argument);
}

// The example in TransformerEngine's documentation of packed context parallelism: cu_seqlens
// 0, 8, 16, 24, 40 on 4 ranks; rank 0 holds the first and the last chunk of each document.
TEST(ZigzagMap, EachDocumentByItself) {
  const IndexMap& map = zigzag_documents_map({8, 8, 8, 16});
  EXPECT_EQ(map.owned(40, 4, 0), (Rows{0, 7, 8, 15, 16, 23, 24, 25, 38, 39}));
  EXPECT_EQ(map.owned(40, 4, 3), (Rows{3, 4, 11, 12, 19, 20, 30, 31, 32, 33}));
  EXPECT_EQ(&map, &zigzag_documents_map({8, 8, 8, 16}));
  EXPECT_THROW(map.owned(48, 4, 0), std::invalid_argument);
}

TEST(ZigzagMap, OwnsEveryRowOnce) {
  const std::vector<int64_t> lengths{7, 0, 1, 10, 0};
  for (int p : {1, 2, 3, 4, 8}) {
    const int64_t rows = pack_each(lengths, 2 * p).rows;
    std::multiset<int64_t> seen;
    for (int r = 0; r < p; ++r)
      for (int64_t row : zigzag_documents_map(lengths).owned(rows, p, r)) seen.insert(row);
    EXPECT_EQ(int64_t(seen.size()), rows);
    EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
  }
}

// The judge's maps and labels and the subject's are written apart: they must agree.
TEST(ContextLine, NamesTheRowsAndTokensOfTheJudge) {
  for (const char* words : {"", "layout=zigzag", "docs=7,1,8", "layout=zigzag docs=0,5,0,7,0",
                            "layout=zigzag_row docs=7,1,8"})
    for (int p : {1, 2, 3, 4, 8}) {
      const Case line = line_of("attention_ring cp=" + std::to_string(p) + " " + words);
      SCOPED_TRACE(print(line));
      const primitives::ContextLine c(line);
      const Operand q = contract_of(line).operands(line)[0];
      EXPECT_EQ(c.rows, q.shape[0]);
      const auto sequences = contract_of(line).sequences(line, q);
      for (int r = 0; r < p; ++r) {
        const auto rows = primitives::owned_rows(c, c.rows, r);
        Rows judged;
        for (int64_t i : whole_indices(q.shape, q.layout, line.mesh(), r))
          if (i % (q.shape[1] * q.shape[2]) == 0) judged.push_back(i / (q.shape[1] * q.shape[2]));
        EXPECT_EQ(rows, judged);
        const auto labels = primitives::AttentionCore().queries(c, r);
        for (size_t i = 0; i < rows.size(); ++i)
          EXPECT_EQ(labels[i].sequence, sequences[size_t(rows[i])]);
      }
    }
}

// ---- Scores beyond the reach of exp

TEST(Refusals, AChoiceOfOneKeyJudgesNoGradient) {
  for (const char* line : {"attention_ring cp=2 scale=1e6", "attention_allgather scale=-1e6",
                           "attention_ring cp=2 fill=large", "attention_block scale=1000",
                           "attention_block fill=large"})
    EXPECT_NE(refusal(line).find("softmax more than one key"), std::string::npos) << line;
  // 1e-6 x 2^40 = 1.1e6; 2^12 / sqrt 3 = 2365 in f16; 5e-10 x 2^40 = 550.
  EXPECT_NE(refusal("attention_ring cp=2 fill=large scale=1e-6"), "");
  EXPECT_NE(refusal("attention_ring cp=2 fill=large dtype=f16"), "");
  EXPECT_EQ(refusal("attention_ring cp=2 fill=large scale=5e-10"), "");
  EXPECT_EQ(refusal("attention_ring cp=2 scale=1000"), "");
  EXPECT_EQ(refusal("attention_block scale=100"), "");
}

// ---- Offsets of documents

TEST(Offsets, AreOperandsOfTheTypeThatTheLineSays) {
  const Case line = line_of("attention_ring cp=2 docs=7,1,8 kv_docs=5,3,12 index=i32");
  const auto operands = contract_of(line).operands(line);
  ASSERT_EQ(operands.size(), 7u);
  for (const auto& [at, name, offsets] :
       {std::tuple{3, "cu_seqlens", Numbers{0, 7, 8, 16}}, {4, "cu_seqlens_k", {0, 5, 8, 20}}}) {
    const Operand& o = operands[size_t(at)];
    EXPECT_EQ(o.name, name);
    EXPECT_EQ(o.role, Operand::index);
    EXPECT_EQ(o.dtype_override, DType::i32);
    EXPECT_EQ(o.stated, offsets);
    EXPECT_EQ(o.shape, (Shape{4}));
  }
  const Case loss = line_of("loss_packed cp=2 docs=0,5 index=i64");
  EXPECT_EQ(contract_of(loss).operands(loss)[2].stated, (Numbers{0, 0, 5}));
  EXPECT_EQ(contract_of(loss).operands(loss)[2].dtype_override, DType::i64);
}

TEST(Offsets, StandForLengths) {
  const Case lengths = line_of("attention_ring cp=2 docs=7,1,8 kv_docs=5,3,12"),
             offsets = line_of("attention_ring cp=2 cu_seqlens=0,7,8,16 cu_seqlens_k=0,5,8,20");
  EXPECT_EQ(offsets.at("tokens"), 16);
  EXPECT_EQ(offsets.at("kv_tokens"), 20);
  EXPECT_EQ(contract_of(lengths).visible(lengths), contract_of(offsets).visible(offsets));
  EXPECT_EQ(primitives::ContextLine(offsets).documents, (Rows{7, 1, 8}));
  EXPECT_EQ(primitives::ContextLine(offsets).key_documents, (Rows{5, 3, 12}));
}

// From the line, and from the tensor that a kernel is handed.
TEST(Offsets, MalformedOnesAreRefusedWithDocumentAndNumbers) {
  struct Wrong {
    const char* offsets;
    std::vector<std::string> says;
  };
  for (const Wrong& w : {Wrong{"1,8,9,17", {"begin with 0", "document 0 beginning at 1"}},
                         Wrong{"0,7,5,16", {"never fall", "document 1 of -2 tokens, from 7 to 5"}},
                         Wrong{"0,7,8,15", {"end with all 16 tokens", "document 2 ending at 15"}},
                         Wrong{"0,7,8,17", {"end with all 16 tokens", "document 2 ending at 17"}},
                         Wrong{"0", {"one document at least"}}}) {
    const std::string said =
        refusal("attention_ring cp=2 tokens=16 index=i64 cu_seqlens=" + std::string(w.offsets));
    for (const std::string& part : w.says)
      EXPECT_NE(said.find(part), std::string::npos) << part << "\n" << said;
    const auto list = parse_list("cu_seqlens", w.offsets);
    for (const DType dtype : {DType::i32, DType::i64}) {
      Buffer tensor(dtype, {int64_t(list.size())}, Strides::transposed);
      fill_from(tensor.view(), Numbers(list.begin(), list.end()));
      const View views[] = {tensor.view()};
      try {
        primitives::context_of(line_of("attention_ring cp=2 docs=7,1,8 index=i64"), views);
        ADD_FAILURE() << w.offsets;
      } catch (const Rejected& e) {
        EXPECT_EQ(e.what(), said);
      }
    }
  }
}

// A kernel goes by the tensor and not by the line.
TEST(Offsets, AreReadFromTheTensor) {
  Buffer tensor(DType::i32, {3});
  fill_from(tensor.view(), Numbers{0, 5, 12});
  const View views[] = {tensor.view()};
  const auto c = primitives::context_of(
      line_of("attention_ring cp=2 layout=zigzag docs=7,5 index=i32"), views);
  EXPECT_EQ(c.documents, (Rows{5, 7}));
  EXPECT_EQ(c.key_documents, (Rows{5, 7}));
  EXPECT_EQ(c.rows, 16);
}

// Three queries of one key and one query of three: the last query stands at the last key.
TEST(ContextLine, AlignsTheQueriesOfADocumentAtItsLastKey) {
  const Case line = line_of("attention_ring docs=3,1 kv_docs=1,3 mask=causal");
  const primitives::ContextLine c(line);
  std::vector<int64_t> queries, keys;
  for (const auto& label : primitives::AttentionCore().queries(c, 0))
    queries.push_back(label.position);
  for (const auto& label : primitives::AttentionCore().keys(c, 0)) keys.push_back(label.position);
  EXPECT_EQ(queries, (Rows{-2, -1, 0, 2}));
  EXPECT_EQ(keys, (Rows{0, 0, 1, 2}));
  EXPECT_EQ(contract_of(line).visible(line),
            (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1}));
}

// ---- Packing

TEST(Packing, PadsEachDocumentOrTheRow) {
  const std::vector<int64_t> lengths{7, 1, 8};
  const Packing each = pack_each(lengths, 8), row = pack_row(lengths, 10);
  EXPECT_EQ(each.cu_seqlens, (Rows{0, 7, 8, 16}));
  EXPECT_EQ(each.cu_padded, (Rows{0, 8, 16, 24}));
  EXPECT_EQ(each.rows, 24);
  EXPECT_EQ(row.cu_padded, (Rows{0, 7, 8, 16}));
  EXPECT_EQ(row.rows, 20);
  EXPECT_EQ(tokens_of(each)[8], (PackedToken{1, 0}));
  EXPECT_EQ(tokens_of(each)[9], (PackedToken{-1, 0}));
  EXPECT_EQ(tokens_of(row)[15], (PackedToken{2, 7}));
  EXPECT_EQ(tokens_of(row)[16].document, -1);
}

TEST(Packing, NextTokensStayInTheirDocument) {
  const std::vector<int64_t> lengths{3, 0, 2}, ids{10, 11, 12, -1, 20, 21, -1, -1};
  const Packing p = pack_each(lengths, 4);
  EXPECT_EQ(p.rows, 8);
  EXPECT_EQ(next_tokens(p, ids), (Rows{11, 12, -100, -100, 21, -100, -100, -100}));
}

TEST(Packing, MalformedOffsetsNameDocumentAndNumbers) {
  EXPECT_EQ(malformed(Rows{0, 7, 7, 10}, 10), "");
  const std::string falls = malformed(Rows{0, 7, 5, 10}, 10), start = malformed(Rows{1, 7}, 7),
                    end = malformed(Rows{0, 7, 9}, 10);
  EXPECT_NE(falls.find("document 1 from 7 to 5"), std::string::npos) << falls;
  EXPECT_NE(start.find("met 1"), std::string::npos) << start;
  EXPECT_NE(end.find("document 1 ending at 9"), std::string::npos) << end;
  EXPECT_NE(end.find("10"), std::string::npos) << end;
  EXPECT_NE(malformed(Rows{}, 0), "");
}

// ---- Refusals

TEST(AttentionRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const Contract& c : family().contracts()) {
    EXPECT_GE(c.illegal.size(), 5u);
    for (const std::string& text : c.illegal) EXPECT_NE(refusal(text), "") << text;
    for (const char* tier : {"smoke", "ci", "nightly"})
      for (const std::string& text : c.cases(tier)) EXPECT_EQ(refusal(text), "") << text;
    for (const std::string& text : c.witnesses) EXPECT_EQ(refusal(text), "") << text;
  }
  for (const Control& c : family().controls())
    EXPECT_EQ(refusal(c.witness) != "", c.check == "rejection") << c.name;
}

TEST(AttentionRefusals, NameWhatIsLegalNearby) {
  const std::string heads = refusal("attention_alltoall cp=4 heads=8 kv_heads=2");
  EXPECT_NE(heads.find("cp=2 is the nearest legal"), std::string::npos) << heads;
  EXPECT_NE(heads.find("kv_replicate=on"), std::string::npos) << heads;
  EXPECT_EQ(refusal("attention_alltoall cp=4 heads=8 kv_heads=2 kv_replicate=on"), "");
  const std::string undivided = refusal("attention_alltoall cp=3 heads=8 kv_heads=4");
  EXPECT_NE(undivided.find("uneven_heads=on"), std::string::npos) << undivided;
  EXPECT_EQ(refusal("attention_alltoall cp=3 heads=8 kv_heads=4 uneven_heads=on"), "");
  const std::string few = refusal("attention_alltoall cp=4 heads=9 kv_heads=3 uneven_heads=on");
  EXPECT_NE(few.find("cp=3 is the nearest legal; or copy key heads"), std::string::npos) << few;
  EXPECT_EQ(refusal("attention_alltoall cp=4 heads=9 kv_heads=3 uneven_heads=on kv_replicate=on"),
            "");
  const std::string fewer =
      refusal("attention_alltoall cp=8 heads=6 kv_heads=3 uneven_heads=on kv_replicate=on");
  EXPECT_NE(fewer.find("heads for each rank of cp"), std::string::npos) << fewer;
  EXPECT_TRUE(fewer.ends_with("cp=6 is the nearest legal")) << fewer;
  const std::string document = refusal("attention_ring cp=2 docs=7,-1,10");
  EXPECT_NE(document.find("document 1 of -1 tokens, from 7 to 6"), std::string::npos) << document;
  // T % 2p = 0, but a position would be cut: seq = 3.
  EXPECT_NE(refusal("attention_ring cp=2 layout=zigzag seq=3 batch=4"), "");
  EXPECT_EQ(refusal("attention_ring cp=4 layout=zigzag tokens=8"), "");
}

// Two key heads on 4 ranks of tp: pairs of ranks hold the same one, and each takes its gradient
// alone.
TEST(AttentionHeads, RanksThatShareAKeyHeadHoldCopiesOfIt) {
  const Case line = line_of("attention_ring tp=4 cp=2 heads=8 kv_heads=2 tokens=16");
  EXPECT_EQ(line.text("kv_replicas"), "2");
  const auto operands = contract_of(line).operands(line);
  EXPECT_EQ(local_shape(operands[0].shape, operands[0].layout, line.mesh(), 0), (Shape{8, 2, 3}));
  for (int rank : {0, 1, 2, 3}) {
    const Operand& k = operands[1];
    EXPECT_EQ(local_shape(k.shape, k.layout, line.mesh(), rank), (Shape{8, 1, 3}));
    // Of [16, 2, 3]: head 0 begins at 0, head 1 at 3.
    EXPECT_EQ(whole_indices(k.shape, k.layout, line.mesh(), rank)[0], rank / 2 * 3);
    EXPECT_EQ(placement_on(dual(k.layout), Axis::rep).kind, Placement::partial);
  }
  EXPECT_NE(refusal("attention_ring tp=4 heads=12 kv_heads=3"), "");
  EXPECT_NE(refusal("attention_block tp=4 heads=12 kv_heads=3"), "");
  EXPECT_EQ(refusal("attention_block tp=4 heads=8 kv_heads=2"), "");
}

// Heads that the ranks of cp are dealt, as the judge cuts lse and as a kernel cuts its operands.
std::vector<Rows> own_heads(const std::string& text) {
  const Case line = line_of(text);
  const Operand lse = contract_of(line).operands(line)[4];
  const int p = line.ranks(Axis::cp);
  const auto counts = primitives::heads_by_rank(lse.shape[1] / line.ranks(Axis::tp),
                                                primitives::dealt_key_heads(line), p);
  std::vector<Rows> heads;
  for (int r = 0; r < line.mesh().world(); ++r) {
    Rows own;
    for (int64_t i : whole_indices(lse.shape, lse.layout, line.mesh(), r))
      if (i < lse.shape[1]) own.push_back(i);  // of token 0
    EXPECT_EQ(counts[size_t(line.mesh().coordinate(r, Axis::cp))], int64_t(own.size())) << text;
    heads.push_back(own);
  }
  return heads;
}

TEST(AttentionHeads, AreDealtInUnequalShares) {
  const std::string line = "attention_alltoall uneven_heads=on ";
  // The example beside DeepSpeed's uneven_heads_all2all: 7 heads on 4 ranks are 2, 2, 2, 1.
  EXPECT_EQ(own_heads(line + "cp=4 heads=7"), (std::vector<Rows>{{0, 1}, {2, 3}, {4, 5}, {6}}));
  // Three key heads of two query heads each, whole groups.
  EXPECT_EQ(own_heads(line + "cp=2 heads=6 kv_heads=3"), (std::vector<Rows>{{0, 1, 2, 3}, {4, 5}}));
  // With copies each query head by itself, also where whole groups would do.
  EXPECT_EQ(own_heads(line + "cp=2 heads=5 kv_heads=1 kv_replicate=on"),
            (std::vector<Rows>{{0, 1, 2}, {3, 4}}));
  EXPECT_EQ(own_heads(line + "cp=2 heads=6 kv_heads=3 kv_replicate=on"),
            (std::vector<Rows>{{0, 1, 2}, {3, 4, 5}}));
  // Of each rank of tp by itself; tp is the faster axis.
  EXPECT_EQ(own_heads(line + "tp=2 cp=2 heads=6"), (std::vector<Rows>{{0, 1}, {3, 4}, {2}, {5}}));
  // Equal shares stay what they are.
  EXPECT_EQ(own_heads(line + "cp=2 heads=4"), own_heads("attention_alltoall cp=2 heads=4"));
}

TEST(AttentionHeads, AKeyHeadIsCopiedAsOftenAsItsRanksNeed) {
  const auto key_heads = [](const std::string& words) {
    return primitives::dealt_key_heads(line_of("attention_alltoall kv_replicate=on " + words));
  };
  EXPECT_EQ(key_heads("cp=4 heads=8 kv_heads=2"), 4);  // one a rank
  EXPECT_EQ(key_heads("cp=2 heads=8 kv_heads=2"), 2);  // none is copied
  EXPECT_EQ(key_heads("cp=1 heads=8 kv_heads=2"), 2);
  // 8 heads on 3 ranks, 3, 3, 2: one for each of them.
  EXPECT_EQ(key_heads("cp=3 heads=8 kv_heads=2 uneven_heads=on"), 8);
  // 4 heads a rank of groups of 6, cut at multiples of 2: one for two query heads.
  EXPECT_EQ(key_heads("cp=3 heads=12 kv_heads=2 uneven_heads=on"), 6);
}

// ---- Traffic

std::vector<std::string> calls(const std::string& text, int rank = 0) {
  const Case line = line_of(text);
  std::vector<std::string> list;
  for (const Traffic& t : contract_of(line).traffic(line, "", rank))
    list.push_back(std::string(t.backward ? "B " : "F ") + name(t.op) + " " +
                   std::to_string(t.count) + " " + name(t.dtype));
  return list;
}
using Calls = std::vector<std::string>;

// T/p = 4 tokens, 2 key heads, dk = 3, dv = 5: K, V of 64 elements; f32 sums under bf16.
TEST(AttentionTraffic, RingTurnsKeysPMinusOneAndGradientsPTimes) {
  const std::string kv = "shift 64 bf16", dkv = "shift 64 f32";
  EXPECT_EQ(calls("attention_ring cp=4 tokens=16 heads=8 kv_heads=2 v_dim=5 dtype=bf16"),
            (Calls{"F " + kv, "F " + kv, "F " + kv, "B " + kv, "B " + dkv, "B " + kv, "B " + dkv,
                   "B " + kv, "B " + dkv, "B " + dkv}));
}

TEST(AttentionTraffic, GatherTwiceAndScatterOnce) {
  EXPECT_EQ(calls("attention_allgather cp=4 tokens=16 heads=8 kv_heads=2 v_dim=5 dtype=bf16"),
            (Calls{"F all_gather 24 bf16", "F all_gather 40 bf16", "B all_gather 24 bf16",
                   "B all_gather 40 bf16", "B reduce_scatter 96 f32", "B reduce_scatter 160 f32"}));
}

// (T/p)(n_h + n_g)(d_k + d_v) elements in 4 calls, both ways.
TEST(AttentionTraffic, FourExchangesEachWay) {
  const Calls due = calls("attention_alltoall cp=2 tokens=8 heads=4 kv_heads=2 v_dim=5");
  EXPECT_EQ(due, (Calls{"F all_to_all 48 f64", "F all_to_all 24 f64", "F all_to_all 40 f64",
                        "F all_to_all 80 f64", "B all_to_all 80 f64", "B all_to_all 48 f64",
                        "B all_to_all 24 f64", "B all_to_all 40 f64"}));
  EXPECT_EQ(48 + 24 + 40 + 80, 4 * (4 + 2) * (3 + 5));
}

// 4 tokens of 3 heads are sent, 8 tokens of 2 heads or of 1 come back.
TEST(AttentionTraffic, UnequalSharesReturnWhatARankWasDealt) {
  const std::string line = "attention_alltoall cp=2 tokens=8 heads=3 v_dim=5 uneven_heads=on";
  const auto due = [](const char* o, const char* qk) {
    Calls list{"F all_to_all 36",      "F all_to_all 36",    "F all_to_all 60",
               std::string("F ") + o,  "B all_to_all 60",    std::string("B ") + qk,
               std::string("B ") + qk, std::string("B ") + o};
    for (std::string& call : list) call += " f64";
    return list;
  };
  EXPECT_EQ(calls(line, 0), due("all_to_all 80", "all_to_all 48"));
  EXPECT_EQ(calls(line, 1), due("all_to_all 40", "all_to_all 24"));
}

// u = 2 of 4 ranks: exchanges in runs, one hop of K, V and two of dK, dV of unchanged length.
TEST(AttentionTraffic, HierarchicalExchangesInRunsAndTurnsAcrossThem) {
  const Case line =
      line_of("attention_hierarchical cp=4 inner=2 tokens=16 heads=4 kv_heads=2 v_dim=5");
  std::vector<std::string> list;
  for (const Traffic& t : contract_of(line).traffic(line, "", 0))
    list.push_back((t.backward ? "B " : "F ") + t.label + " " + std::to_string(t.count));
  EXPECT_EQ(list, (Calls{"F cp/2 48", "F cp/2 24", "F cp/2 40", "F cp%2 64", "F cp/2 80",
                         "F cp/2 16", "B cp/2 80", "B cp%2 64", "B cp%2 64", "B cp%2 64",
                         "B cp/2 48", "B cp/2 24", "B cp/2 40"}));
}

int64_t elements(const std::string& text) {
  const Case line = line_of(text);
  int64_t n = 0;
  for (const Traffic& t : contract_of(line).traffic(line, "", 0)) n += t.count;
  return n;
}

TEST(AttentionTraffic, AQuarterOfTheKeyHeadsIsAQuarterOfTheRing) {
  EXPECT_EQ(elements("attention_ring cp=4 heads=8 kv_heads=8"),
            4 * elements("attention_ring cp=4 heads=8 kv_heads=2"));
}

// ---- Pairs

int64_t pairs(const std::string& text, int rank) {
  const Case line = line_of(text);
  return contract_of(line).pairs(line, rank);
}

TEST(AttentionPairs, ZigzagGivesEveryRankTheSame) {
  for (int64_t p : {1, 2, 3, 4, 8}) {
    const int64_t l = 48 / (2 * p), due = l * (l + 1) + (2 * p - 1) * l * l;
    for (int r = 0; r < p; ++r)
      EXPECT_EQ(pairs("attention_ring layout=zigzag mask=causal cp=" + std::to_string(p), r), due);
    EXPECT_EQ(due * p, 48 * 49 / 2);
  }
}

TEST(AttentionPairs, ContiguousGivesTheLastRankTheMost) {
  // 12 tokens a rank: r * 12 * 12 before the own block, 78 in it.
  for (int r : {0, 1, 2, 3}) EXPECT_EQ(pairs("attention_ring mask=causal cp=4", r), r * 144 + 78);
  EXPECT_EQ(pairs("attention_ring cp=4", 2), 12 * 48);
  EXPECT_EQ(pairs("attention_ring cp=4 kv_tokens=64", 2), 12 * 64);
}

TEST(AttentionPairs, AreThoseOfTheMask) {
  for (const char* words :
       {"mask=causal window=5,0 layout=zigzag", "window=3,2", "docs=7,1,8 mask=causal",
        "docs=0,5,0,7 layout=zigzag window=2,1", "seq=8 batch=3 mask=causal",
        "kv_tokens=16 mask=causal", "kv_tokens=64 mask=causal window=4,-1",
        "docs=7,1,8 kv_docs=5,3,12 mask=causal layout=zigzag",
        "docs=4,0,6,5 kv_docs=0,7,2,5 window=2,-1"}) {
    const std::string text = std::string("attention_ring cp=4 ") + words;
    const Case line = line_of(text);
    const auto visible = contract_of(line).visible(line);
    int64_t sum = 0;
    for (int r = 0; r < 4; ++r) sum += pairs(text, r);
    EXPECT_EQ(sum, std::accumulate(visible.begin(), visible.end(), int64_t(0))) << text;
  }
}

// ---- Kernels on threads

using on_threads::Workspaces;

// Whole outputs, gradients, and what each rank computed and used.
struct Outcome : on_threads::Outcome {
  std::vector<int64_t> pairs;
};

Numbers drawn(const std::string& name, const Shape& shape) {
  const Stream123 stream(7, name);
  Numbers v(size_t(product(shape)));
  for (size_t i = 0; i < v.size(); ++i) v[i] = stream.normal(i);
  return v;
}

template <class Kernel>
Outcome run_kernel(const Case& line, const std::vector<Numbers>& inputs,
                   const std::vector<Numbers>& cotangents) {
  std::vector<int64_t> pairs(size_t(line.mesh().world()));
  auto run = on_threads::run_kernels(
      line, contract_of(line).operands(line), [] { return std::make_unique<Kernel>(); }, inputs,
      cotangents, [&](int rank, Kernel& kernel) { pairs[size_t(rank)] = kernel.pairs(); });
  return {std::move(run), std::move(pairs)};
}

template <class Kernel>
Outcome run_drawn(const std::string& text) {
  const Case line = line_of(text);
  const auto o = contract_of(line).operands(line);
  return run_kernel<Kernel>(
      line, {drawn("q", o[0].shape), drawn("k", o[1].shape), drawn("v", o[2].shape)},
      {drawn("go", o[3].shape), Numbers(size_t(product(o[4].shape)))});
}

// Documents of 8 tokens, which 2 cp divides: no padding. Rows of two documents are those of each
// of them alone, forward and backward, bit for bit: the same sums in the same order.
template <class Kernel>
void expect_packed_is_alone(const std::string& contract) {
  SCOPED_TRACE(contract);
  const std::string words = " cp=2 layout=zigzag mask=causal heads=4 kv_heads=2 v_dim=5";
  const Case both = line_of(contract + words + " docs=8,8"),
             alone = line_of(contract + words + " tokens=8");
  const auto o = contract_of(both).operands(both);
  const std::vector<Numbers> inputs{drawn("q", o[0].shape), drawn("k", o[1].shape),
                                    drawn("v", o[2].shape)},
      cotangents{drawn("go", o[3].shape), Numbers(size_t(product(o[4].shape)))};
  const Outcome packed = run_kernel<Kernel>(both, inputs, cotangents);
  for (const std::string& why : packed.thrown) ASSERT_EQ(why, "");
  for (const size_t document : {0, 1}) {
    auto half = [&](const std::vector<Numbers>& all) {
      std::vector<Numbers> parts;
      for (const Numbers& v : all) {
        const auto n = int64_t(v.size() / 2);
        parts.emplace_back(v.begin() + n * int64_t(document),
                           v.begin() + n * int64_t(document + 1));
      }
      return parts;
    };
    const Outcome one = run_kernel<Kernel>(alone, half(inputs), half(cotangents));
    EXPECT_EQ(one.outputs, half(packed.outputs));
    EXPECT_EQ(one.gradients, half(packed.gradients));
  }
}

TEST(AttentionOnRanks, PackedIsEachDocumentAlone) {
  expect_packed_is_alone<primitives::AttentionRing>("attention_ring");
  expect_packed_is_alone<primitives::AttentionAllGather>("attention_allgather");
  expect_packed_is_alone<primitives::AttentionAllToAll>("attention_alltoall");
  expect_packed_is_alone<primitives::AttentionHierarchical>("attention_hierarchical");
}

// The same rows as one document: under a causal mask the first eight tokens see what they saw, and
// every later one sees more.
TEST(AttentionOnRanks, WithoutTheBoundaryTheSecondDocumentReadsTheFirst) {
  const std::string words =
      "attention_ring cp=2 layout=zigzag mask=causal heads=4 kv_heads=2 docs=";
  const Outcome two = run_drawn<primitives::AttentionRing>(words + "8,8"),
                one = run_drawn<primitives::AttentionRing>(words + "16");
  for (size_t token = 0; token < 16; ++token)
    for (size_t head = 0; head < 4; ++head) {
      const size_t at = token * 4 + head;
      const double lse = one.outputs[1][at], alone = two.outputs[1][at];
      EXPECT_GE(lse - alone, token < 8 ? -1e-14 : 1e-3) << at;
      EXPECT_TRUE(token >= 8 || lse - alone <= 1e-14) << at;
      EXPECT_EQ(std::abs(one.outputs[0][at * 3] - two.outputs[0][at * 3]) < 1e-14, token < 8) << at;
    }
}

// The kernel computes the pairs that are due on its rank and no more: blocks that no query sees
// are left out. All-to-all spreads heads, and each rank computes every pair for its own.
TEST(AttentionOnRanks, ComputesTheDuePairsOnly) {
  for (const char* words : {"layout=zigzag mask=causal", "mask=causal", "mask=causal window=5,0",
                            "docs=7,1,8 layout=zigzag mask=causal", ""}) {
    const std::string rest = std::string(" cp=4 heads=4 kv_heads=4 ") + words;
    const Outcome ring = run_drawn<primitives::AttentionRing>("attention_ring" + rest),
                  gather = run_drawn<primitives::AttentionAllGather>("attention_allgather" + rest),
                  alltoall = run_drawn<primitives::AttentionAllToAll>("attention_alltoall" + rest);
    int64_t all = 0;
    for (int r = 0; r < 4; ++r) {
      const int64_t due = pairs("attention_ring" + rest, r);
      EXPECT_EQ(ring.pairs[size_t(r)], due) << words;
      EXPECT_EQ(gather.pairs[size_t(r)], due) << words;
      all += due;
    }
    for (int r = 0; r < 4; ++r) EXPECT_EQ(alltoall.pairs[size_t(r)], all) << words;
  }
}

TEST(AttentionOnRanks, TheRingNeedsTwoBuffersOfKeysAndValues) {
  // 12 tokens a rank, 2 key heads, dk = 3, dv = 5.
  for (const char* p : {"2", "4", "8"}) {
    const Outcome run = run_drawn<primitives::AttentionRing>(
        std::string("attention_ring layout=zigzag heads=4 kv_heads=2 v_dim=5 cp=") + p);
    const int64_t message = 48 / std::stoi(p) * 2 * (3 + 5);
    for (const Workspaces& used : run.forward)
      EXPECT_EQ(used.shapes, (std::vector<Shape>{{message}, {message}}));
  }
}

TEST(AttentionOnRanks, RowsOfPaddingAreExactlyNothing) {
  const std::string text = "attention_ring cp=4 layout=zigzag docs=7,1,8 heads=2 kv_heads=2";
  const Outcome run = run_drawn<primitives::AttentionRing>(text);
  const Case line = line_of(text);
  const auto sequences = contract_of(line).sequences(line, contract_of(line).operands(line)[0]);
  EXPECT_EQ(std::count(sequences.begin(), sequences.end(), -1), 8);
  for (size_t t = 0; t < sequences.size(); ++t) {
    if (sequences[t] >= 0) continue;
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(run.outputs[0][t * 6 + i], 0);
      for (const Numbers& g : run.gradients) EXPECT_EQ(g[t * 6 + i], 0);
    }
    EXPECT_EQ(run.outputs[1][t * 2], -infinity);
  }
}

// Q = 0 under a causal mask: token i averages the first i + 1 values; V_j = j gives i/2.
TEST(AttentionOnRanks, EqualScoresAverageAcrossRanks) {
  for (const char* contract : strategies) {
    const Case line =
        line_of(std::string(contract) +
                " cp=4 layout=zigzag mask=causal tokens=16 heads=4 kv_heads=4 head_dim=1");
    Numbers q(64), k = drawn("k", {64}), v(64), g(64, 1), gl(64);
    for (size_t i = 0; i < v.size(); ++i) v[i] = double(i / 4);
    const std::vector<Numbers> in{q, k, v}, cot{g, gl};
    const Outcome run =
        contract == strategies[0]   ? run_kernel<primitives::AttentionAllGather>(line, in, cot)
        : contract == strategies[1] ? run_kernel<primitives::AttentionRing>(line, in, cot)
                                    : run_kernel<primitives::AttentionAllToAll>(line, in, cot);
    for (size_t i = 0; i < 64; ++i) {
      const double token = double(i / 4);
      EXPECT_NEAR(run.outputs[0][i], token / 2, 1e-14) << contract;
      EXPECT_NEAR(run.outputs[1][i], std::log(token + 1), 1e-14) << contract;
      // dV_j = sum over i >= j of 1/(i+1).
      double due = 0;
      for (double n = token + 1; n <= 16; ++n) due += 1 / n;
      EXPECT_NEAR(run.gradients[2][i], due, 1e-14) << contract;
    }
  }
}

// Q = 0 without a mask: every row averages all 12 values of its key head, lse = log 12, and dV is
// 1/12 of the cotangents of all tokens and query heads that read it. Head h has the values h + 1
// times the token and the cotangent h + 1.
TEST(AttentionOnRanks, UnequalSharesOfHeads) {
  struct Heads {
    int64_t ranks, queries, keys;
    const char* words;
  };
  for (const auto& [p, n, g, words] : {Heads{3, 5, 5, ""},
                                       {2, 6, 3, ""},
                                       {3, 8, 2, " kv_replicate=on"},
                                       {4, 6, 1, " kv_replicate=on"}}) {
    const Case line =
        line_of("attention_alltoall uneven_heads=on tokens=12 head_dim=1 cp=" + std::to_string(p) +
                " heads=" + std::to_string(n) + " kv_heads=" + std::to_string(g) + words);
    SCOPED_TRACE(print(line));
    const auto T = size_t(12), N = size_t(n), G = size_t(g), group = N / G;
    Numbers v(T * G), cotangent(T * N);
    for (size_t i = 0; i < v.size(); ++i) v[i] = double((i % G + 1) * (i / G));
    for (size_t i = 0; i < cotangent.size(); ++i) cotangent[i] = double(i % N + 1);
    const Outcome run = run_kernel<primitives::AttentionAllToAll>(
        line, {Numbers(T * N), drawn("k", {12, g, 1}), v}, {cotangent, Numbers(T * N)});
    for (const std::string& why : run.thrown) ASSERT_EQ(why, "");
    for (size_t i = 0; i < T * N; ++i) {
      EXPECT_NEAR(run.outputs[0][i], double(i % N / group + 1) * 5.5, 1e-13);
      EXPECT_NEAR(run.outputs[1][i], std::log(12.), 1e-14);
    }
    for (size_t i = 0; i < T * G; ++i) {
      double due = 0;
      for (size_t h = i % G * group; h < (i % G + 1) * group; ++h) due += double(h + 1);
      EXPECT_NEAR(run.gradients[2][i], due, 1e-13);
    }
  }
}

// ---- The checks on controls

std::string failing(const std::string& text, const std::vector<std::string>& checks) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(text)));
  const Judged j = runner.run(*lines.back(), checks, lane_of(*lines.back()));
  std::string text_of;
  for (const CheckResult& c : j.result.checks)
    if (c.verdict != Verdict::passed)
      text_of += c.check + ": " + (c.findings.empty() ? c.note : c.findings[0].message) + "\n";
  return text_of;
}

TEST(AttentionChecks, MaskNamesQueryAndKey) {
  const std::string line = "attention_ring cp=4 layout=zigzag mask=causal";
  EXPECT_EQ(failing(line, {"mask", "coverage"}), "");
  const std::string strict = failing(line + " control=strict_causal", {"mask"});
  EXPECT_NE(strict.find("query 0"), std::string::npos) << strict;
  EXPECT_NE(strict.find("does not see key 0"), std::string::npos) << strict;
  // Without the last ring step rank 0 never meets the keys of rank 1.
  const std::string skipped = failing(line + " control=ring_step_skipped", {"coverage"});
  EXPECT_NE(skipped.find("expected 294 (query, key) pairs"), std::string::npos) << skipped;
}

// What a line ends with where its reference is NaN somewhere, forward or backward.
std::string without_reference(bool backward) {
  Contract c = family().contract("attention_ring");
  const auto spoilt = [](std::vector<Whole> list) {
    list[0].value[3] = std::numeric_limits<double>::quiet_NaN();
    return list;
  };
  if (backward)
    c.backward = [=, truth = c.backward](const Case& line, std::span<const Whole> in,
                                         std::span<const Whole> cot, std::vector<Gauge>* gauges) {
      return spoilt(truth(line, in, cot, gauges));
    };
  else
    c.forward = [=, truth = c.forward](const Case& line, std::span<const Whole> in,
                                       std::vector<Gauge>* gauges) {
      return spoilt(truth(line, in, gauges));
    };
  Registry registry;
  registry.add(c);
  registry.add(family().subject("attention_ring", ""));
  const Case line = parse("attention_ring cp=2", registry);
  Options options;
  Runner runner(options, registry);
  try {
    runner.run(line, {"forward", "gradient"}, lane_of(line));
  } catch (const Infrastructure& e) {
    return e.what();
  }
  return "judged";
}

TEST(AttentionChecks, NobodyIsJudgedByAReferenceThatIsNaN) {
  const std::string forward = without_reference(false), backward = without_reference(true);
  EXPECT_NE(forward.find("numbers in o from finite inputs, met NaN"), std::string::npos) << forward;
  EXPECT_NE(backward.find("numbers in the gradient of q from finite inputs"), std::string::npos)
      << backward;
}

TEST(AttentionChecks, JudgeDocumentsOfOtherCountsOfKeys) {
  const std::string line = "attention_ring cp=2 docs=7,1,8 kv_docs=5,3,12 mask=causal";
  EXPECT_EQ(failing(line, {"forward", "gradient", "mask", "coverage", "leak"}), "");
  const std::string first = failing(line + " control=top_left_causal", {"mask"});
  EXPECT_NE(first.find("query 0"), std::string::npos) << first;
}

// Tokens of q, o and lse are told apart by docs, those of k and v by kv_docs.
TEST(AttentionChecks, KeysHaveSequencesOfTheirOwn) {
  const Case line = line_of("attention_ring cp=2 docs=3,1,1 kv_docs=1,0,4");
  for (const Operand& o : contract_of(line).operands(line)) {
    const bool key = o.name == "k" || o.name == "v";
    EXPECT_EQ(contract_of(line).sequences(line, o),
              key ? (Rows{0, 2, 2, 2, 2, -1}) : (Rows{0, 0, 0, 1, 2, -1}))
        << o.name;
  }
}

TEST(AttentionChecks, LeakIsSilentOnHealthyPackingAndNamesTheDocument) {
  const std::string line = "attention_ring cp=4 layout=zigzag mask=causal docs=7,1,8";
  EXPECT_EQ(failing(line, {"leak"}), "");
  const std::string leaks = failing(line + " control=finite_mask_bias", {"forward", "leak"});
  EXPECT_EQ(leaks.find("forward"), std::string::npos) << leaks;
  EXPECT_NE(leaks.find("changed when sequence"), std::string::npos) << leaks;
}

}  // namespace attention_test
}  // namespace
}  // namespace shardproof
