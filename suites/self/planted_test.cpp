// Every fault planted in the judge as a test of its own: what a gate does at its start, one by one.
#include <gtest/gtest.h>

#include "oracle/self.hpp"

namespace shardproof {

void PrintTo(const Planted& p, std::ostream* out) { *out << p.name; }

namespace {

class PlantedFault : public testing::TestWithParam<Planted> {};
INSTANTIATE_TEST_SUITE_P(Judge, PlantedFault, testing::ValuesIn(planted_faults()),
                         [](const auto& info) { return info.param.name; });

TEST_P(PlantedFault, GetsTheVerdictThatItDeserves) { EXPECT_EQ(GetParam().plant(), ""); }

TEST(PlantedFaults, AreMany) { EXPECT_GE(planted_faults().size(), 45u); }

}  // namespace
}  // namespace shardproof
