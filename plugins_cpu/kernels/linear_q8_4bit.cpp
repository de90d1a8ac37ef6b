// linear_q8 for schemes with 4-bit codes.
#include "linear_q8.h"

namespace castiron {

CASTIRON_KERNEL("linear_q8.q4_0", LinearQ8Params, linear_q8<Q4_0>);
CASTIRON_KERNEL("linear_q8.q4_1", LinearQ8Params, linear_q8<Q4_1>);
CASTIRON_KERNEL("linear_q8.q4_k", LinearQ8Params, linear_q8<Q4_K>);

}  // namespace castiron
