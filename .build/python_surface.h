// Each of mypyc's C files includes this behind mypyc's own headers; python_surface.c says what it is for.

#ifndef KV_POOL_PYTHON_SURFACE_H
#define KV_POOL_PYTHON_SURFACE_H

void KVPool_TypeError(const char *expected, const char *variable, PyObject *value);
CPyTagged KVPool_TakeInt(const char *name, PyObject *value, int *is_wrong);
int KVPool_Document(PyObject *globals);

#define CPy_TypeError(expected, variable) KVPool_TypeError(expected, #variable, variable)

// A compiled class of the package has one base, so a walk along the bases finds almost every subclass.
static inline int KVPool_IsInstance(PyObject *object, PyTypeObject *type) {
    for (PyTypeObject *base = Py_TYPE(object); base != NULL; base = base->tp_base)
        if (base == type)
            return 1;
    return PyType_IsSubtype(Py_TYPE(object), type);
}

#undef PyObject_TypeCheck
#define PyObject_TypeCheck(object, type) KVPool_IsInstance((PyObject *)(object), type)

#ifndef Py_GIL_DISABLED
// Take arguments that are all passed by position, where that is enough; else 0, and mypyc's parser looks at them.
// `num_targets` and `is_simple` are constants, so that a compiler unrolls the loop; simple is what has no keyword-only
// arguments and no *args or **kwargs.
static inline int KVPool_TakePositional(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                                        CPyArg_Parser *parser, PyObject **const *targets, Py_ssize_t num_targets,
                                        int is_simple) {
    if (kwnames != NULL || parser->kwtuple == NULL || nargs < parser->min || nargs > parser->max)
        return 0;
    if (!is_simple && (parser->has_required_kws || parser->varargs))
        return 0;
    for (Py_ssize_t i = 0; i < num_targets && i < nargs; i++)
        *targets[i] = args[i];
    return 1;
}

#define KVPool_TAKE(args, nargs, kwnames, parser, is_simple, ...)                                                     \
    KVPool_TakePositional(args, nargs, kwnames, parser, (PyObject **[]){__VA_ARGS__},                                 \
                          sizeof((PyObject **[]){__VA_ARGS__}) / sizeof(PyObject **), is_simple)

#define CPyArg_ParseStackAndKeywordsNoArgs(args, nargs, kwnames, parser)                                              \
    (((nargs) == 0 && (kwnames) == NULL) || CPyArg_ParseStackAndKeywordsNoArgs(args, nargs, kwnames, parser))
#define CPyArg_ParseStackAndKeywordsOneArg(args, nargs, kwnames, parser, target)                                      \
    (((nargs) == 1 && (kwnames) == NULL) ? (*(target) = (args)[0], 1)                                                 \
                                         : CPyArg_ParseStackAndKeywordsOneArg(args, nargs, kwnames, parser, target))
#define CPyArg_ParseStackAndKeywordsSimple(args, nargs, kwnames, parser, ...)                                         \
    (KVPool_TAKE(args, nargs, kwnames, parser, 1, __VA_ARGS__) ||                                                     \
     CPyArg_ParseStackAndKeywordsSimple(args, nargs, kwnames, parser, __VA_ARGS__))
#define CPyArg_ParseStackAndKeywords(args, nargs, kwnames, parser, ...)                                               \
    (KVPool_TAKE(args, nargs, kwnames, parser, 0, __VA_ARGS__) ||                                                     \
     CPyArg_ParseStackAndKeywords(args, nargs, kwnames, parser, __VA_ARGS__))
#endif

#endif
