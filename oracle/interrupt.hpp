// Ctrl-C and TERM end a run between two cases, so that its report can still be written.
#pragma once

namespace shardproof {

// From now on the first SIGINT or SIGTERM only raises the flag; a second one ends the process.
void catch_interrupts();
bool interrupted();

}  // namespace shardproof
