// Rounding mode, flush-to-zero and exception masks: what a subject must leave as it found it, and
// what a program that is linked with -Ofast has changed before its main begins.
#pragma once
#include <string>

namespace shardproof {

struct FloatEnvironment {
  unsigned control = 0;
  int rounding = 0;

  static FloatEnvironment now();
  static FloatEnvironment judged();  // round to nearest, denormals kept, nothing traps
  // Once, by the program: keeps what it met for at_start() and puts judged() in its place.
  static void start_judging();
  static const FloatEnvironment& at_start();

  void restore() const;
  // "flush-to-zero switched on, ..."; empty where they are equal.
  std::string difference(const FloatEnvironment& before) const;
};

}  // namespace shardproof
