// What is due: which subjects a gate judges, and what these declare that they do not do.
#pragma once
#include <string>
#include <vector>

#include "oracle/gate.hpp"

namespace shardproof {

// Subjects of a contract that are judged: those asked for; else a user's where the registry has
// any, else all.
std::vector<std::string> subjects_due(const Options&, const Registry&, const Contract&);
// Throws BadInput: unknown subjects asked for; registered ones whose contract does not exist or
// does not take what they are `without`, or that make nothing.
void check_subjects(const Options&, const Registry&);

// Why its subject is not due on the line: "linear_row subject=mine: dtype=bf16"; "" where it is
// due.
std::string not_due(const Case&, const Registry&);
// Words of the line that its subject is `without`: "sp=on", "strides=transposed"; "" where there
// are none. A type is none of them: what a check sees in one it sees in another.
std::string words_without(const Case&, const Declared&);
// "linear_row subject=mine".
std::string called(const Case&);
// The checks that a declaration takes off a line that is due, by name; "" where none:
// "linear_row subject=mine: gradient, adjoint". Without what is `not proven` in its place.
std::string checks_not_due(const Case&, const Registry&, const std::vector<std::string>& only);

// The checks that are due on other lines of the contract and not on this one, each with its reason:
// "gradcheck: asked in f64".
std::vector<std::string> checks_left_out(const Case&, const Registry&,
                                         const std::vector<std::string>& only);

// Both, of a line that is judged alone, and what of `only` is asked of no such line.
std::vector<std::string> checks_unasked(const Case&, const Registry&,
                                        const std::vector<std::string>& only);
// Checks that are not due because the subject declares to have no backward.
std::vector<std::string> checks_of_backward(const Case&, const Registry&,
                                            const std::vector<std::string>& only);

// Lines on which operators are tried, on a transport, for a subject: the contract's witnesses
// (where one is not due, the first f64 case of as many ranks that is), in the widest type declared.
std::vector<Case> witnesses_due(const Contract&, const Registry&, const std::string& transport,
                                const std::string& subject);

// What of the judge a healthy run has not reached, as lanes that are not proven: ledger and
// operators of subjects that communicate by themselves or have no witness.
std::vector<Lane> unproven(const Options&, const Registry&, const std::vector<Due>&);

}  // namespace shardproof
