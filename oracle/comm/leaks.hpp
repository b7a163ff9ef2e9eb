// Memory that ranks leak. Ranks leave by _exit, where LeakSanitizer does not look, and at an exit
// after MPI_Finalize it would name what MPI's own libraries keep; so each rank looks before it
// leaves. Only builds with AddressSanitizer look.
#pragma once
#include <string>

namespace shardproof {

bool leaks_are_looked_for();
// LeakSanitizer's words on this process; "" where nothing leaks, or where this build does not look.
std::string leaks_of_this_process();
// Says whose leak it is on standard error and counts it, for all processes that this program
// forked.
void note_leak(const std::string& whose, const std::string& words);
int leaks_noted();

}  // namespace shardproof
