"""What emitted code reads at addresses that are known at run time alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, as_pointer, pointer

_MOST = 1 << 30  # elements that a buffer of unknown length is declared with


@dataclass(slots=True)
class Reads:
    """Statements that bind what is read from addresses, in order."""

    stmts: list[Stmt] = field(default_factory=list)

    def at(self, address: Expr, dtype: str, name: str) -> Buffer:
        """A buffer at an address."""
        var = pointer(f"{name}_ptr", dtype)
        declared = T.decl_buffer((_MOST,), dtype, name, data=var)
        self.stmts.extend(
            [S.Bind(var, as_pointer(address, dtype)), S.DeclBuffer(declared, data=var)]
        )
        return declared

    def bind(self, value: Expr, name: str) -> Expr:
        var = T.Var(name, "int64")
        self.stmts.append(S.Bind(var, value))
        return var

    def word(self, address: Expr, name: str) -> Expr:
        return self.bind(self.at(address, "int64", name)[0], f"{name}_word")
