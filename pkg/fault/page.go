package fault

import "errors"

// paged is an error that a page of the documentation explains.
type paged struct {
	page string
	err  error
}

// Error implements error. The text does not have the page: the RPC edge appends it.
func (p *paged) Error() string { return p.err.Error() }

// Unwrap returns the error that the page was added to.
func (p *paged) Unwrap() error { return p.err }

// See adds the page that explains an error, such as "docs/explanation/mounts.md#memory", for errors that need another one than their RPC and
// kind have by default. nil stays nil, and page "" adds nothing.
func See(page string, err error) error {
	if err == nil || page == "" {
		return err
	}
	return &paged{page, err}
}

// SeeElse is See for errors that have no page yet.
func SeeElse(page string, err error) error {
	if PageOf(err) != "" {
		return err
	}
	return See(page, err)
}

// PageOf returns the page of the outermost error in err's chain that has one, or "".
func PageOf(err error) string {
	if p := (*paged)(nil); errors.As(err, &p) {
		return p.page
	}
	return ""
}
