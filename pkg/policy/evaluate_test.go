package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// verdict is what a policy says about a request.
type verdict string

const (
	allowed verdict = "allowed"
	denied  verdict = "denied" // by a Deny: no other policy can allow it
	silent  verdict = "silent" // another policy could allow it
)

// asked is one question that a service puts to a policy. A request can make it ask several, and is allowed when all are.
type asked struct {
	action, resource string
	context          map[string]string // condition keys of the request
}

// evaluator judges by the rules of the IAM User Guide ("Policy evaluation logic", "IAM JSON policy elements: Condition
// operators"). It shares nothing with what it tests, and knows only what policies of this package use: anything else is an error.
type evaluator struct {
	statements []evaluated
	escapes    bool // ${*} is a star that is meant, as on AWS; elsewhere $ is a character like others
	compiled   map[string]*regexp.Regexp
}

type evaluated struct {
	effect                                   string
	action, notAction, resource, notResource []string
	conditions                               map[string]map[string][]string
}

func newEvaluator(t testing.TB, policy string, escapes bool) evaluator {
	t.Helper()
	var doc struct {
		Version   string
		Statement []map[string]json.RawMessage
	}
	if err := json.Unmarshal([]byte(policy), &doc); err != nil || doc.Version != "2012-10-17" {
		t.Fatalf("%v in version %q: %s", err, doc.Version, policy)
	}
	e := evaluator{escapes: escapes, compiled: map[string]*regexp.Regexp{}}
	for _, raw := range doc.Statement {
		var s evaluated
		for name, value := range raw {
			switch name {
			case "Effect":
				if err := json.Unmarshal(value, &s.effect); err != nil || s.effect != "Allow" && s.effect != "Deny" {
					t.Fatalf("effect %s", value)
				}
			case "Action":
				s.action = texts(t, value)
			case "NotAction":
				s.notAction = texts(t, value)
			case "Resource":
				s.resource = texts(t, value)
			case "NotResource":
				s.notResource = texts(t, value)
			case "Condition":
				var c map[string]map[string]json.RawMessage
				must(t, json.Unmarshal(value, &c))
				s.conditions = map[string]map[string][]string{}
				for op, keys := range c {
					s.conditions[op] = map[string][]string{}
					for k, v := range keys {
						s.conditions[op][k] = texts(t, v)
					}
				}
			default:
				t.Fatalf("unknown element %s", name)
			}
		}
		if (len(s.action) == 0) == (len(s.notAction) == 0) || (len(s.resource) == 0) == (len(s.notResource) == 0) {
			t.Fatalf("a statement needs one of Action and NotAction, and one of Resource and NotResource: %s", policy)
		}
		e.statements = append(e.statements, s)
	}
	return e
}

func texts(t testing.TB, raw json.RawMessage) []string {
	t.Helper()
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return []string{one}
	}
	var many []string
	if err := json.Unmarshal(raw, &many); err != nil || len(many) == 0 {
		t.Fatalf("neither a text nor some: %s", raw)
	}
	return many
}

func (e evaluator) judge(q asked) verdict {
	v := silent
	for _, s := range e.statements {
		if !e.applies(s, q) {
			continue
		}
		if s.effect == "Deny" {
			return denied
		}
		v = allowed
	}
	return v
}

// all is what becomes of a request that asks several questions.
func (e evaluator) all(questions ...asked) verdict {
	worst := allowed
	for _, q := range questions {
		switch e.judge(q) {
		case denied:
			return denied
		case silent:
			worst = silent
		}
	}
	return worst
}

// otherAction reports whether one of the questions is about an action that the policy allows nowhere.
func (e evaluator) otherAction(questions []asked) bool {
	return slices.ContainsFunc(questions, func(q asked) bool {
		return !slices.ContainsFunc(e.statements, func(s evaluated) bool {
			return s.effect == "Allow" && slices.ContainsFunc(s.action, func(p string) bool { return e.like(strings.ToLower(p), strings.ToLower(q.action)) })
		})
	})
}

func (e evaluator) applies(s evaluated, q asked) bool {
	// Names of actions know no case.
	action := func(p string) bool { return e.like(strings.ToLower(p), strings.ToLower(q.action)) }
	resource := func(p string) bool { return e.like(p, q.resource) }
	switch {
	case s.action != nil && !slices.ContainsFunc(s.action, action),
		s.notAction != nil && slices.ContainsFunc(s.notAction, action),
		s.resource != nil && !slices.ContainsFunc(s.resource, resource),
		s.notResource != nil && slices.ContainsFunc(s.notResource, resource):
		return false
	}
	for operator, keys := range s.conditions {
		for key, values := range keys {
			if !e.holds(operator, values, q.context, key) {
				return false
			}
		}
	}
	return true
}

func (e evaluator) holds(operator string, values []string, context map[string]string, key string) bool {
	have, present := context[key]
	like := present && slices.ContainsFunc(values, func(p string) bool { return e.like(p, have) })
	equal := present && slices.Contains(values, have)
	switch operator {
	case "StringLike":
		return like
	case "StringNotLike":
		return !like
	case "StringEquals":
		return equal
	case "StringNotEquals":
		return !equal
	}
	panic("unknown operator " + operator)
}

var special = regexp.MustCompile(`\$\{[*?$]\}|[*?]`)

// like matches as IAM does: * is any number of characters, ? is one.
func (e evaluator) like(pattern, text string) bool {
	if re, ok := e.compiled[pattern]; ok {
		return re.MatchString(text)
	}
	var re strings.Builder
	last := 0
	for _, at := range special.FindAllStringIndex(pattern, -1) {
		token := pattern[at[0]:at[1]]
		re.WriteString(regexp.QuoteMeta(pattern[last:at[0]]))
		switch {
		case token == "*":
			re.WriteString(`.*`)
		case token == "?":
			re.WriteString(`.`)
		case e.escapes:
			re.WriteString(regexp.QuoteMeta(token[2:3]))
		default:
			panic("a variable where there are none: " + pattern)
		}
		last = at[1]
	}
	re.WriteString(regexp.QuoteMeta(pattern[last:]))
	e.compiled[pattern] = regexp.MustCompile(`(?s)\A(?:` + re.String() + `)\z`)
	return e.compiled[pattern].MatchString(text)
}

func TestTheEvaluatorKnowsItsRules(t *testing.T) {
	e := newEvaluator(t, `{"Version":"2012-10-17","Statement":[
		{"Effect":"Allow","Action":["s3:Get*","s3:ListBucket"],"Resource":"arn:aws:s3:::b*"},
		{"Effect":"Deny","NotAction":"s3:*","Resource":"*"},
		{"Effect":"Deny","Action":"*","NotResource":["arn:aws:s3:::b","arn:aws:s3:::b/a${*}?/*"]},
		{"Effect":"Deny","Action":"s3:ListBucket","Resource":"*","Condition":{"StringNotLike":{"s3:prefix":"x/*"}}}]}`, true)
	for q, want := range map[string]verdict{
		"s3:GetObject arn:aws:s3:::b/a*1/k":     allowed,
		"S3:getobject arn:aws:s3:::b/a*1/":      allowed,
		"s3:GetObject arn:aws:s3:::b/ab1/k":     denied,
		"s3:GetObject arn:aws:s3:::b/a*/k":      denied,
		"s3:GetObject arn:aws:s3:::b2":          denied,
		"s3:PutObject arn:aws:s3:::b/a*1/k":     silent,
		"iam:GetUser arn:aws:s3:::b":            denied,
		"s3:ListBucket arn:aws:s3:::b":          denied,
		"s3:ListBucket arn:aws:s3:::b x/":       allowed,
		"s3:ListBucket arn:aws:s3:::b x":        denied,
		"s3:ListBucket arn:aws:s3:::b x/y\nz/":  allowed,
		"s3:GetObject arn:aws:s3:::b/a*\n/a\nb": allowed,
	} {
		part := strings.SplitN(q, " ", 3)
		ask := asked{action: part[0], resource: part[1]}
		if len(part) == 3 {
			ask.context = map[string]string{"s3:prefix": part[2]}
		}
		if got := e.judge(ask); got != want {
			t.Errorf("%q: %s, want %s", q, got, want)
		}
	}
}

// calls are requests to S3 as questions to a policy (Service Authorization Reference, "Actions, resources, and condition keys for
// Amazon S3"), through whatever the scope's bucket is.
type calls struct {
	partition, bucket string
	accessPoint       string // its ARN; then bucket is what is behind it
}

func (c calls) ask(action, key string, onObject bool, context map[string]string) []asked {
	partition := c.partition
	if partition == "" {
		partition = "aws"
	}
	direct := "arn:" + partition + ":s3:::" + c.bucket
	if onObject {
		direct += "/" + key
	}
	if c.accessPoint == "" {
		return []asked{{action, direct, context}}
	}
	through := map[string]string{"s3:DataAccessPointArn": c.accessPoint}
	maps.Copy(through, context)
	resource := c.accessPoint
	if onObject {
		resource += "/object/" + key
	}
	return []asked{{action, resource, through}, {action, direct, through}}
}

func (c calls) object(action, key string) []asked { return c.ask(action, key, true, nil) }
func (c calls) onBucket(action string) []asked    { return c.ask(action, "", false, nil) }
func (c calls) list(action, prefix string) []asked {
	return c.ask(action, "", false, map[string]string{"s3:prefix": prefix})
}
func (c calls) copy(from calls, source, target string) []asked {
	return append(from.object("s3:GetObject", source), c.object("s3:PutObject", target)...)
}

// never are requests on the bucket that no mount and no deletion of a prefix may make.
func (c calls) never() map[string][]asked {
	m := map[string][]asked{
		"a listing without a prefix": c.onBucket("s3:ListBucket"),
		"HEAD of the bucket":         c.onBucket("s3:ListBucket"),
		"ListBuckets":                {{"s3:ListAllMyBuckets", "*", nil}},
		"CreateBucket":               {{"s3:CreateBucket", "arn:aws:s3:::another", nil}},
		"AssumeRole":                 {{"sts:AssumeRole", "arn:aws:iam::123456789012:role/x", nil}},
		"CreateAccessKey":            {{"iam:CreateAccessKey", "*", nil}},
		"KMS itself":                 {{"kms:Decrypt", "arn:aws:kms:eu-west-1:123456789012:key/k", nil}},
		"another KMS action": {{"kms:ScheduleKeyDeletion", "arn:aws:kms:eu-west-1:123456789012:key/k",
			map[string]string{"kms:ViaService": "s3.eu-west-1.amazonaws.com"}}},
		"a directory bucket": {{"s3express:CreateSession", "arn:aws:s3express:eu-west-1:123456789012:bucket/b--x--x-s3", nil}},
	}
	for _, action := range []string{"PutBucketPolicy", "GetBucketPolicy", "DeleteBucketPolicy", "PutBucketAcl", "GetBucketAcl", "PutBucketVersioning",
		"PutLifecycleConfiguration", "PutReplicationConfiguration", "PutBucketPublicAccessBlock", "PutBucketNotification", "PutBucketCORS", "GetBucketLocation"} {
		m[action] = c.onBucket("s3:" + action)
	}
	return m
}

// neverObject are requests on an object, in scope or not, that no mount may make.
func (c calls) neverObject(key string) map[string][]asked {
	m := map[string][]asked{}
	for _, action := range []string{"GetObjectAcl", "PutObjectAcl", "GetObjectTagging", "PutObjectTagging", "GetObjectVersion", "GetObjectRetention",
		"PutObjectRetention", "PutObjectLegalHold", "BypassGovernanceRetention", "RestoreObject"} {
		m[fmt.Sprintf("%s of %q", action, key)] = c.object("s3:"+action, key)
	}
	return m
}
