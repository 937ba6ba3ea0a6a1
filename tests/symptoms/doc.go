// Package symptoms causes what wakes an operator, and follows the words that one then sees to the page with the cause and the cure.
package symptoms
