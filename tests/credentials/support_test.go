package credentials

import (
	"time"
)

// short is how long sessions last that are to be renewed soon. A busy machine must be able to, before an upload with the last one fails.
const short = 6 * time.Second
