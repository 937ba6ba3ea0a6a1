// Package credentials tests, from end to end, that a mount's credentials reach no further than its volume, that they are
// renewed as long as the mount lives, and that nothing secret is seen by anybody: real drivers, real clients and services
// whose security token services enforce policies.
package credentials
