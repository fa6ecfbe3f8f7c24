"""Structured output: the tokens that a grammar allows next in a sequence.

    event loop        GrammarCompiler -----socket------> fork server    (llguidance, vocabulary)
                            |                                | fork
                            |<--CompiledGrammar-- one process per grammar  (compiles, follows)
    engine's thread   Matcher <--------masks---------------->|

The compiler sends one end of a new socket to the fork server for each grammar. A new process, the
grammar process, serves that end.

    json_schema    JSON schema, checked and limited -> grammar for llguidance
    ebnf           GBNF -> grammar in Lark syntax
    vocabulary     llguidance's vocabulary

llguidance compiles lazily: it creates the states of the lexer when a mask needs them. A schema with
three properties compiles in 1 ms of CPU time, and one with 40 in 2 ms. A mask over SmolLM2's 49,152
tokens takes 6 us at the median and 42 us at the 99th percentile (Zen 4). llguidance limits the
lexer's states and the work of one step, but this does not bound the time of an ambiguous grammar:

    ((a{1,100}){1,100}){1,100}           compiles in 1 ms; the 28th token exceeds a limit after 2 ms
    root ::= root root | root root root  compiles in 1 ms; the 100th token takes 11 ms, the 200th 66
              | "a"

Each grammar therefore has a process of its own, which also parses its schema. The kernel ends the
process when an operation exceeds its CPU time or the process exceeds its memory. The sequences of
that grammar then fail with the cause; nothing else is affected. A fork takes 8 ms and a process
5 MiB.

The next mask is computed as soon as a token is accepted, while the model computes, and is usually
available when the sampler needs it.
"""
