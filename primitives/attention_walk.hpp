// A tile of rows of one side of attention, past which the tiles of the other side go. Tiles of
// which no pair is seen are left out: that is asked of labels alone, of each row of the other side
// against the span of the own ones. Rows of padding are taken for zeros, so that it may hold
// anything.
#pragma once
#include "primitives/attention_pairs.hpp"
#include "primitives/tile_products.hpp"

namespace shardproof::primitives {

// Scores, and the weights that come of them: in place where they are of one type.
template <class Math, class Size,
          bool in_place = sizeof(typename Math::Sum) == sizeof(typename Math::Factor)>
struct ScoreTiles {
  Tile<typename Math::Sum, Size::own, Size::other> scores;
  SHARDPROOF_HD auto& weights() { return scores; }
};
template <class Math, class Size>
struct ScoreTiles<Math, Size, false> {
  Tile<typename Math::Sum, Size::own, Size::other> scores;
  Tile<typename Math::Factor, Size::own, Size::other> narrow;
  SHARDPROOF_HD auto& weights() { return narrow; }
};

template <int n>
struct RowTable {
  TokenLabel label[n];
  int64_t line[n], place[2][n];  // of each operand; -1 where there is no row, or one of padding
};

// What a team shares. `held`: operands of the own side that are factors.
template <class Math, class Team, int held>
struct WalkRoom {
  using Size = typename Team::template Size<Math>;
  using Factor = typename Math::Factor;
  Tile<Factor, Size::own, Size::strip> own[held];
  union {
    Tile<Factor, Size::other, Size::depth> columns;
    Tile<Factor, Size::lines, Size::strip> rows;
  } passing;
  ScoreTiles<Math, Size> score;
  RowTable<Size::own> own_rows;
  RowTable<Size::other> other_rows;
};

// Where labels of several rows lie.
struct LabelSpan {
  int64_t first_sequence = INT64_MAX, last_sequence = -1;
  int64_t first_position = INT64_MAX, last_position = INT64_MIN;
  bool padding = false;

  SHARDPROOF_HD void add(TokenLabel l) {
    if (l.sequence < 0) {
      padding = true;
      return;
    }
    first_sequence = l.sequence < first_sequence ? l.sequence : first_sequence;
    last_sequence = last_sequence < l.sequence ? l.sequence : last_sequence;
    first_position = l.position < first_position ? l.position : first_position;
    last_position = last_position < l.position ? l.position : last_position;
  }
};

template <class Math, class Team, int held>
class AttentionWalk {
 public:
  using Size = typename Team::template Size<Math>;
  using Room = WalkRoom<Math, Team, held>;
  using Dots = typename Team::template Dots<Math>;
  using Sums = typename Team::template Sums<Math>;

  // each_row(row of the tile, line), as in `next`.
  template <class EachRow>
  SHARDPROOF_HD AttentionWalk(const Team& team, Room& room, const AttentionPairs& of,
                              const AttentionSide& own, int64_t first, const AttentionSide& other,
                              bool own_keys, EachRow each_row)
      : team_(team), room_(room), of_(of), own_(own), other_(other), own_keys_(own_keys) {
    n_.own = in_tile(own.count() - first, Size::own);
    team.join();  // the tile before this one is done with the room
    list(own, first, n_.own, room.own_rows, each_row);
    team.join();
    for (int r = 0; r < Team::upto(Size::own, n_.own); ++r) span_.add(room.own_rows.label[r]);
  }

  // The next tile of which something may be seen: false where there is none. For each of its rows,
  // each_row(row of the tile, line), line -1 of padding.
  template <class EachRow>
  SHARDPROOF_HD bool next(EachRow each_row) {
    for (; next_ < other_.count(); next_ += Size::other) {
      n_.other = in_tile(other_.count() - next_, Size::other);
      bool some = false, all = true;
      for (int r = team_.thread(); r < n_.other; r += Team::threads)
        some = some || may_see(other_.label(next_ + r));
      if (!team_.any(some)) continue;  // behind it nobody reads the table of the tile before
      list(other_, next_, n_.other, room_.other_rows, each_row);
      for (int r = team_.thread(); r < Team::upto(Size::other, n_.other); r += Team::threads)
        all = all && sees_all(room_.other_rows.label[r]);
      whole_ = team_.all(all);
      next_ += Size::other;
      return true;
    }
    return false;
  }
  SHARDPROOF_HD void again() { next_ = 0; }

  SHARDPROOF_HD Extent extent() const { return n_; }
  SHARDPROOF_HD Extent extent(int64_t columns) const {
    return {n_.own, n_.other, in_tile(columns, Size::strip)};
  }
  SHARDPROOF_HD bool sees(int own_row, int other_row) const {
    if (whole_) return true;
    const TokenLabel &own = room_.own_rows.label[own_row],
                     &other = room_.other_rows.label[other_row];
    if (own.sequence < 0 || own.sequence != other.sequence) return false;
    const int64_t ahead = other.position - own.position;
    return of_.mask.shows(own_keys_ ? -ahead : ahead);
  }

  // Products of the own rows and those of the tile, of one operand.
  SHARDPROOF_HD void multiply(int operand, Dots& dots) {
    const RowSource passing = source(other_, room_.other_rows, operand);
    dots.clear();
    for (int64_t strip = 0; strip < passing.width; strip += Size::strip) {
      hold(operand, strip);
      const int columns = in_tile(passing.width - strip, Size::strip);
      for (int at = 0; at < columns; at += Size::depth) {
        team_.join();
        stage<Math>(team_, passing, 0, n_.other, strip + at, room_.passing.columns);
        team_.join();
        dots.add(room_.own[operand], at, room_.passing.columns,
                 {n_.own, n_.other, in_tile(columns - at, Size::depth)});
      }
    }
  }
  // The weights of the room times a strip of the tile's rows.
  SHARDPROOF_HD void add(int operand, int64_t strip, Sums& sums) {
    const RowSource passing = source(other_, room_.other_rows, operand);
    for (int at = 0; at < n_.other; at += Size::lines) {
      const int lines = in_tile(n_.other - at, Size::lines);
      team_.join();  // weights are there, and what passed before has been read
      stage<Math>(team_, passing, at, lines, strip, room_.passing.rows);
      team_.join();
      sums.add(team_, room_.score.weights(), at, room_.passing.rows,
               {n_.own, lines, in_tile(passing.width - strip, Size::strip)}, !whole_);
    }
  }

  // A strip of own rows, from where sums go on and to where they are put: by way of the tile of
  // scores, as many columns at a time as it has.
  SHARDPROOF_HD void take(const Tensor& from, int64_t width, int64_t strip, Sums& sums) const {
    using A = typename Math::Sum;
    each_block(width, strip, [&](int block, int64_t column, Extent n) {
      each_place(n, [&](int r, int c) {
        room_.score.scores.at(r, c) =
            r < n_.own && c < n.other
                ? from.template load<A>(room_.own_rows.line[r] * width + column + c)
                : A(0);
      });
      team_.join();
      sums.each(extent(width - strip), [&](int r, int c, A& sum) {
        if (c / Size::other == block) sum = room_.score.scores.at(r, c % Size::other);
      });
    });
  }
  SHARDPROOF_HD void give(Sums& sums, const Tensor& to, int64_t width, int64_t strip) const {
    using A = typename Math::Sum;
    each_block(width, strip, [&](int block, int64_t column, Extent n) {
      sums.each(extent(width - strip), [&](int r, int c, A& sum) {
        if (c / Size::other == block) room_.score.scores.at(r, c % Size::other) = sum;
      });
      team_.join();
      each_place(n, [&](int r, int c) {
        if (r < n_.own && c < n.other)
          to.store(room_.own_rows.line[r] * width + column + c, room_.score.scores.at(r, c));
      });
    });
  }

  // Products to the tile of scores, for whoever needs them next behind a join.
  SHARDPROOF_HD void put_scores(Dots& dots) const {
    dots.each(n_, [&](int r, int c, typename Math::Sum dot) { room_.score.scores.at(r, c) = dot; });
  }
  // f(own row, other row, score) for those of this thread, a unit at a time.
  template <class F>
  SHARDPROOF_HD void each_score(Extent n, F f) const {
    using A = typename Math::Sum;
    constexpr int unit = Unit<A>::length;
    const int in_row = (Team::upto(Size::other, n.other) + unit - 1) / unit,
              count = Team::upto(Size::own, n.own) * in_row;
    SHARDPROOF_ROLLED
    for (int i = team_.thread(); i < count; i += Team::threads) {
      const int r = i / in_row, first = i % in_row * unit;
      Unit<A> u = room_.score.scores.unit_at(r, first);
      SHARDPROOF_UNROLLED
      for (int e = 0; e < unit; ++e) f(r, first + e, u.at[e]);
      room_.score.scores.put(r, first, u);
    }
  }

 private:
  SHARDPROOF_HD static int in_tile(int64_t rest, int size) {
    return rest < size ? int(rest) : size;
  }
  // f(block, its first column, extent of the scores) for what columns of a strip go at a time.
  template <class F>
  SHARDPROOF_HD void each_block(int64_t width, int64_t strip, F f) const {
    for (int block = 0; block < Size::strip / Size::other; ++block) {
      const int64_t column = strip + block * Size::other;
      if (column >= width) break;
      team_.join();
      f(block, column, Extent{n_.own, in_tile(width - column, Size::other), 0});
    }
    team_.join();
  }

  // f(own row, column) for those scores of this thread, whole units: a load or a store of any type
  // is written out once.
  template <class F>
  SHARDPROOF_HD void each_place(Extent n, F f) const {
    constexpr int unit = Unit<typename Math::Sum>::length;
    const int in_row = (Team::upto(Size::other, n.other) + unit - 1) / unit * unit,
              count = Team::upto(Size::own, n.own) * in_row;
    SHARDPROOF_ROLLED
    for (int i = team_.thread(); i < count; i += Team::threads) f(i / in_row, i % in_row);
  }

  template <int n, class EachRow>
  SHARDPROOF_HD void list(const AttentionSide& side, int64_t first, int count, RowTable<n>& rows,
                          EachRow each_row) {
    for (int r = team_.thread(); r < Team::upto(n, count); r += Team::threads) {
      rows.label[r] = side.label(first + r);
      rows.line[r] = r < count ? side.line(first + r) : 0;
      const bool padding = rows.label[r].sequence < 0;
      for (int o = 0; o < 2; ++o)
        rows.place[o][r] = padding || !side.operands[o]
                               ? -1
                               : side.operands[o]->place(rows.line[r] * of_.width(o));
      each_row(r, padding ? -1 : rows.line[r]);
    }
  }
  template <int n>
  SHARDPROOF_HD RowSource source(const AttentionSide& side, const RowTable<n>& rows,
                                 int operand) const {
    return {*side.operands[operand], of_.width(operand), rows.place[operand]};
  }
  SHARDPROOF_HD void hold(int operand, int64_t strip) {
    if (held_[operand] == strip) return;
    team_.join();
    stage<Math>(team_, source(own_, room_.own_rows, operand), 0, n_.own, strip, room_.own[operand]);
    held_[operand] = strip;
  }

  SHARDPROOF_HD int64_t least_ahead(TokenLabel l) const {
    return own_keys_ ? span_.first_position - l.position : l.position - span_.last_position;
  }
  SHARDPROOF_HD int64_t most_ahead(TokenLabel l) const {
    return own_keys_ ? span_.last_position - l.position : l.position - span_.first_position;
  }
  SHARDPROOF_HD bool may_see(TokenLabel l) const {
    return l.sequence >= 0 && l.sequence >= span_.first_sequence &&
           l.sequence <= span_.last_sequence && of_.mask.shows_some(least_ahead(l), most_ahead(l));
  }
  SHARDPROOF_HD bool sees_all(TokenLabel l) const {
    return !span_.padding && l.sequence == span_.first_sequence &&
           l.sequence == span_.last_sequence && of_.mask.shows_all(least_ahead(l), most_ahead(l));
  }

  const Team& team_;
  Room& room_;
  const AttentionPairs& of_;
  const AttentionSide &own_, &other_;
  bool own_keys_, whole_ = false;
  LabelSpan span_;
  Extent n_{};
  int64_t next_ = 0, held_[2] = {-1, -1};
};

}  // namespace shardproof::primitives
