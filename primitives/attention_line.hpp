// What the primitives over a context-parallel axis read from a case line: how its tokens are cut
// over cp, which sequence and position each of them has, and what is refused. All of it follows
// from the line, which is equal on all ranks.
//
//   layout=contiguous   rank r owns block r of the row
//   layout=zigzag       2p chunks, rank r owns chunks r and 2p-1-r; with docs= each document is
//                       padded to a multiple of 2p and cut like that by itself
//   layout=zigzag_row   the whole row of packed documents is cut like that
#pragma once
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oracle/subject.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

// Sequence -1 is padding: it sees nothing and is not seen.
struct Label {
  int64_t sequence = -1, position = 0;
};

struct ContextLine {
  explicit ContextLine(const Case&);
  int ranks;  // of cp
  std::string layout;
  // Lengths; empty: not packed. Documents may hold other counts of keys than of queries (kv_docs=).
  std::vector<int64_t> documents, key_documents;
  int64_t rows, key_rows;  // of dim 0 over all ranks, padding included
  int64_t batch;           // sequences side by side on a rank (dim 1), 1 where not seq
};

// The line, with the documents that index tensors hold (index=i32|i64: cu_seqlens of the queries,
// then, where keys have documents of their own, of the keys) in place of those that it says. Throws
// Rejected where they are malformed.
ContextLine context_of(const Case&, std::span<const View> cu_seqlens);

// The same line with the keys' documents and rows in the place of the queries'.
ContextLine of_keys(const ContextLine&);
int64_t rows_of_documents(const std::string& layout, const std::vector<int64_t>& lengths,
                          int ranks);
// Rows of dim 0 that rank r owns, in local order.
std::vector<int64_t> owned_rows(const ContextLine&, int64_t rows, int r);
// Labels of all rows: of packed documents, or of one sequence whose first position is `first`.
std::vector<Label> labels_of_documents(const ContextLine&);
std::vector<Label> labels_of_sequence(int64_t rows, int64_t first);
// Tokens of rank r in the order in which a local tensor holds them ([rows, batch] flattened).
std::vector<Label> local_labels(const ContextLine&, const std::vector<Label>& by_row, int r);

// "left,right" of window=, -1 where unlimited; both -1 without the key's value.
struct Window {
  int64_t left = -1, right = -1;
};
Window window_of(const Case&);

// Ranks of tp that hold the same key heads, where there are fewer of these than ranks.
int64_t copies_of_keys(const Case&);

// Of `extent` things each rank has floor or ceil(extent/ranks), the first ranks one more.
std::vector<int64_t> dealt(int64_t extent, int ranks);
// Key heads that a tp rank deals to its ranks of cp, each with the query heads that read it. With
// kv_replicate=on the query heads are dealt, and a key head is copied as often as its query heads
// need one of their own rank.
int64_t dealt_key_heads(const Case&);

// Of which a contract over context counts the elements.
inline constexpr const char* whole_operand = "a whole operand";

// Extents, documents and axes; `each`: heads that the strategy has to cut further over cp.
std::optional<Rejected> refused_context(const Case&);
std::optional<Rejected> refused_attention(const Case&);
std::optional<Rejected> refused_attention_alltoall(const Case&);
std::optional<Rejected> refused_attention_hierarchical(const Case&);

}  // namespace shardproof::primitives
