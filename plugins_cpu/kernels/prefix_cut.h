// top-k and top-p as a cut through the tokens ordered by scaled logit, largest first, and by id among equals.
#pragma once
#include <cstdint>
#include <limits>

#include "float_vector.h"

namespace castiron {

// A row of logits as a distribution: scaled logits are (logit - largest) / temperature, so the largest is 0.
// A NaN logit counts as -infinity.
struct ScaledLogits {
    const float *logits;  // [vocab]
    int32_t vocab;
    float largest;  // of the logits that aren't NaN; more than -infinity
    float temperature;

    // The kVecLanes from token on; -infinity past the end.
    Vec at(int32_t token) const {
        const Vec none = splat(-std::numeric_limits<float>::infinity());
        const int32_t rest = vocab - token;
        Vec x = none;
        if (rest >= kVecLanes) {
            x = load(logits + token);
        } else if (rest > 0) {
            x = select(first_lanes(rest), load_first(logits + token, rest), none);
        }
        const Vec scaled = (x - splat(largest)) / splat(temperature) + splat(0.0f);  // never -0
        return select(equal(x, splat(largest)), splat(0.0f), select(equal(x, x), scaled, none));
    }
};

// Kept are tokens with a larger value, and of those with this value the ids up to last_token.
struct PrefixCut {
    float value = -std::numeric_limits<float>::infinity();
    int32_t last_token = std::numeric_limits<int32_t>::max();

    bool keeps_less_than(const PrefixCut &other) const {
        return value > other.value || (value == other.value && last_token < other.last_token);
    }
};

// Finds cuts without sorting: three passes narrow down the bits of the value, 11 + 10 + 10 of them, by
// histograms. Scaled logits are <= 0, so their bits without the sign rank them, 0 first.
class CutFinder {
  public:
    struct Histogram {
        int32_t count[2048];
        double mass[2048];  // sum of e^scaled
    };

    CutFinder(const ScaledLogits &row, Histogram &histogram) : row_(row), histogram_(histogram) {}

    // The first `count` tokens (1 <= count <= vocab); *mass_kept becomes the sum of their e^scaled.
    PrefixCut first_tokens(int64_t count, double *mass_kept) { return find(count, kNoMass, mass_kept); }

    // The fewest first tokens, at least one, whose e^scaled sum to `mass`.
    PrefixCut first_mass(double mass) {
        double ignored;
        return find(std::numeric_limits<int64_t>::max(), mass, &ignored);
    }

    // The sum of e^scaled of all tokens from this scaled logit (<= 0) up.
    double mass_from(float value) {
        fill(20, 2047, 0, float_to_bits(0.0f - value));
        double mass = 0.0;
        for (double bucket : histogram_.mass) mass += bucket;
        return mass;
    }

  private:
    static constexpr double kNoMass = std::numeric_limits<double>::infinity();
    static constexpr uint32_t kInfinityRank = 0x7F800000;

    // Histogram of the ranks from `least` to `most` by (rank >> shift) & mask.
    void fill(int shift, uint32_t mask, uint32_t least, uint32_t most) {
        for (uint32_t b = 0; b <= mask; ++b) histogram_.count[b] = 0, histogram_.mass[b] = 0.0;
        const Vec low = splat(bits_to_float(least));
        const Vec high = splat(bits_to_float(most < kInfinityRank ? most : kInfinityRank));
        for (int32_t token = 0; token < row_.vocab; token += kVecLanes) {
            const Vec scaled = row_.at(token), distance = abs(scaled);
            uint32_t inside =
                lanes_of(token) & ~lane_bits(greater(low, distance)) & ~lane_bits(greater(distance, high));
            if (!inside) continue;
            float ranks[kVecLanes], masses[kVecLanes];
            store(ranks, distance);
            store(masses, exp(scaled));
            for (int i = 0; inside; ++i, inside >>= 1) {
                if (!(inside & 1)) continue;
                const uint32_t bucket = float_to_bits(ranks[i]) >> shift & mask;
                histogram_.count[bucket] += 1;
                histogram_.mass[bucket] += static_cast<double>(masses[i]);
            }
        }
    }

    uint32_t lanes_of(int32_t token) const {
        const int32_t rest = row_.vocab - token;
        return rest >= kVecLanes ? (1u << kVecLanes) - 1 : (1u << rest) - 1;
    }

    // The shortest prefix of `count` tokens or of mass `mass`, whichever comes first.
    PrefixCut find(int64_t count, double mass, double *mass_kept) {
        int64_t count_before = 0;
        double mass_before = 0.0;
        uint32_t prefix = 0, bucket = 0;
        constexpr int kShifts[3] = {20, 10, 0};
        for (int shift : kShifts) {
            const uint32_t mask = shift == 20 ? 2047 : 1023;
            const uint32_t least = shift == 20 ? 0 : prefix << (shift + 10);
            const uint32_t most = shift == 20 ? kInfinityRank : least | ((1u << (shift + 10)) - 1);
            fill(shift, mask, least, most);
            uint32_t last = mask;  // rounding may keep the mass from being reached: then all are kept
            while (last > 0 && histogram_.count[last] == 0) --last;
            for (bucket = 0; bucket < last; ++bucket) {
                if (count_before + histogram_.count[bucket] >= count) break;
                if (mass_before + histogram_.mass[bucket] >= mass) break;
                count_before += histogram_.count[bucket];
                mass_before += histogram_.mass[bucket];
            }
            prefix = shift == 20 ? bucket : prefix << 10 | bucket;
        }
        // all that are left have the same value
        const int64_t equals = histogram_.count[bucket];
        const double mass_each = histogram_.mass[bucket] / static_cast<double>(equals);
        int64_t kept = 1;
        while (kept < equals && count_before + kept < count &&
               mass_before + static_cast<double>(kept) * mass_each < mass) {
            ++kept;
        }
        *mass_kept = mass_before + static_cast<double>(kept) * mass_each;
        const float value = 0.0f - bits_to_float(prefix);
        return {value, kept == equals ? std::numeric_limits<int32_t>::max() : find_equal(value, kept)};
    }

    // Id of the n-th token (from 1) with this value.
    int32_t find_equal(float value, int64_t n) const {
        for (int32_t token = 0; token < row_.vocab; token += kVecLanes) {
            uint32_t found = lane_bits(equal(row_.at(token), splat(value))) & lanes_of(token);
            for (int32_t i = 0; found; ++i, found >>= 1) {
                if ((found & 1) && --n == 0) return token + i;
            }
        }
        return std::numeric_limits<int32_t>::max();
    }

    const ScaledLogits &row_;
    Histogram &histogram_;
};

}  // namespace castiron
