// linear_q8 for schemes with 6-bit and 8-bit codes.
#include "linear_q8.h"

namespace castiron {

CASTIRON_KERNEL("linear_q8.q6_k", LinearQ8Params, linear_q8<Q6_K>);
CASTIRON_KERNEL("linear_q8.q8_0", LinearQ8Params, linear_q8<Q8_0>);

}  // namespace castiron
